"""Build the fuzz target with libFuzzer and sanitizers, and run it for a while: `python run.py --seconds 30`.

--standalone [COMMAND]    no libFuzzer: pseudo-random inputs, any C compiler (default cc)
--emulator COMMAND        run what was built through this, e.g. "qemu-aarch64 -L /usr/aarch64-linux-gnu" with
                          --standalone aarch64-linux-gnu-gcc: so the NEON kernel is tested on x86
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parent / "native"
FLAGS_X86 = {
    "pclmul": ["-msse4.1", "-mpclmul"],
    "vpclmul": ["-mavx512f", "-mvpclmulqdq"],
    "vpclmul_256": ["-mavx2", "-mvpclmulqdq"],
    "avx2": ["-mavx2"],
    "gfni": ["-mavx512bw", "-mavx512vbmi", "-mgfni"],
    "gfni_256": ["-mavx2", "-mgfni"],
}
FLAGS_ARM = {"neon": ["-march=armv8-a+crypto"]}


def build(compiler: str, options: list[str], folder: Path) -> Path:
    """Compile every kernel with its own instructions, and the target; return the program."""
    machine = subprocess.run([compiler, "-dumpmachine"], capture_output=True, text=True, check=True).stdout
    flags = FLAGS_ARM if machine.startswith(("aarch64", "arm64")) else FLAGS_X86
    objects = []
    for source in [*sorted(NATIVE.glob("*.c")), HERE / "fuzz_kernels.c"]:
        target = folder / f"{source.stem}.o"
        command = [compiler, *options, *flags.get(source.stem, []), "-c", str(source), "-o", str(target)]
        subprocess.run(command, check=True)
        objects.append(str(target))
    program = folder / "fuzz_kernels"
    subprocess.run([compiler, *options, *objects, "-o", str(program), "-lpthread"], check=True)
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--runs", type=int, default=2000, help="of a standalone program")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--corpus", type=Path, help="where libFuzzer keeps what it finds")
    parser.add_argument("--standalone", nargs="?", const="cc")
    parser.add_argument("--emulator", default="")
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    print(f"seed {seed}: repeat with --seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="leto-ec-fuzz-") as temporary:
        folder = Path(temporary)
        if options.standalone:
            program = build(options.standalone, ["-O2", "-g", "-DSTANDALONE"], folder)
            command = [*shlex.split(options.emulator), str(program), str(seed), str(options.runs)]
            return subprocess.run(command, timeout=60 + 10 * options.seconds, check=False).returncode
        clang = shutil.which("clang")
        if clang is None:
            print("clang is needed for libFuzzer; without it: --standalone", file=sys.stderr)
            return 2
        flags = ["-O1", "-g", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize=alignment"]
        program = build(clang, [*flags, "-fno-sanitize-recover=all"], folder)
        corpus = options.corpus or folder / "corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        command = [
            str(program),
            f"-max_total_time={options.seconds}",
            f"-seed={seed}",
            "-timeout=20",
            "-max_len=40",  # all that a run takes from its input ...
            "-len_control=0",  # ... and from the first run on: half a minute is no time to grow to it
            str(corpus),
        ]
        environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # leaks: ptrace may be forbidden
        limit = 120 + 2 * options.seconds
        return subprocess.run(command, timeout=limit, env=environment, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
