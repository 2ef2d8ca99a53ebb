"""The files for Slurm and Kubernetes: they parse, agree with themselves, and say what `leto run` understands.

The Slurm script is run for real, with a `srun` that starts its tasks on this host. There is no Kubernetes.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from leto_shadow import cli, launch
from leto_shadow.archive import read_job
from leto_shadow.exit_codes import ExitCode

EXAMPLES = Path(__file__).parents[2] / "examples"
SBATCH = EXAMPLES / "slurm" / "train.sbatch"
SCRIPTS = Path(__file__).parents[1] / "protocol" / "scripts"
SHOW = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


def checked(words: list[str], tmp_path: Path) -> Any:
    """What `leto run` makes of a command line, with its own checks; GPUs and the script are not here."""
    assert words[0] == "run"
    script = tmp_path / "train.py"
    script.touch()
    words = [str(script) if word == "train.py" else word for word in words]
    arguments, unknown = cli._parser().parse_known_args(words)
    assert unknown == []
    assert arguments.backend == "cuda"
    arguments.backend = "host"
    launch.check(arguments)
    return arguments


# --- Slurm ----------------------------------------------------------------------------------------------


def test_the_slurm_script_is_a_script() -> None:
    subprocess.run(["bash", "-n", str(SBATCH)], check=True, timeout=30)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(SBATCH)], check=True, timeout=60)
    text = SBATCH.read_text()
    options = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    body = text.index("set -euo pipefail")
    assert all(text.index(line) < body for line in options), "Slurm reads none behind the first command"
    assert "#SBATCH --ntasks-per-node=1" in options, "one torchrun per node"


def test_what_the_slurm_script_tells_leto(tmp_path: Path) -> None:
    bin_ = tmp_path / "bin"
    program(bin_, "srun", '#!/bin/sh\nshift\nexec "$@"\n')
    program(bin_, "scontrol", "#!/bin/sh\nprintf 'node7\\nnode8\\n'\n")
    program(bin_, "leto", SHOW)
    environment = {
        **os.environ,
        "PATH": f"{bin_}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_GPUS_ON_NODE": "8",
        "LETO_OPTIONS": "--shadow-level 2",
    }
    done = subprocess.run(
        ["bash", str(SBATCH), "train.py", "--words", "a b"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    arguments = checked(json.loads(done.stdout), tmp_path)
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.job_id) == ("2", 8, "slurm-4711")
    assert (arguments.rdzv_endpoint, arguments.shadow_level) == ("node7:24711", 2)
    assert arguments.script_args == ["--words", "a b"]
    assert arguments.keep == tmp_path / "leto-jobs"


@pytest.mark.job
@pytest.mark.slow
def test_the_slurm_script_runs_a_job_of_two_nodes(tmp_path: Path, short_path: Path) -> None:
    """Both "nodes" are this host; everything else is as under Slurm."""
    bin_ = tmp_path / "bin"
    program(bin_, "srun", '#!/bin/sh\nshift\n"$@" & one=$!\n"$@" & two=$!\nwait $one && wait $two\n')
    program(bin_, "scontrol", "#!/bin/sh\necho 127.0.0.1\n")
    program(bin_, "leto", f'#!/bin/sh\nexec {sys.executable} -m leto_shadow.cli "$@"\n')
    with socket.create_server(("127.0.0.1", 0)) as probe:  # a number whose port is free
        number = probe.getsockname()[1]
    while number % 10000 + 20000 != number:
        with socket.create_server(("127.0.0.1", 20000 + number % 10000)) as probe:
            number = probe.getsockname()[1]
    stop = tmp_path / "stop"
    stop.touch()  # the script is done as soon as it has begun
    pool = "--page-bytes 4096 --data-pages 8 --tier1-pages 2 --decide counter:decide"
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "LETO_", "SLURM_"))},
        "PATH": f"{bin_}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(number),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "both",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "RANKS_PER_NODE": "1",
        "LETO_OPTIONS": f"{pool} --run-dir {short_path / 'run'} --shadow-level 0",
    }
    script = [str(SCRIPTS / "counter.py"), "100000", "--until", str(stop)]
    done = subprocess.run(
        ["bash", str(SBATCH), *script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kept = tmp_path / "leto-jobs" / f"slurm-{number}"
    assert sorted(path.name for path in kept.iterdir()) == ["node0", "node1"]
    events, _ = read_job([kept])
    assert [event["nodes"] for event in events if event["event"] == "job_started"] == [2]
    assert cli.main(["report", str(kept), "--html", str(tmp_path / "page.html")]) == 0
    assert sorted(path.name for path in (short_path / "run").iterdir()) == ["events.jsonl", "logs"]


# --- Kubernetes -----------------------------------------------------------------------------------------


def documents(name: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    text = (EXAMPLES / "kubernetes" / name).read_text()
    return [document for document in yaml.safe_load_all(text) if document]


def told(container: dict[str, Any], tmp_path: Path, **given: str) -> Any:
    """The command line of a container, as its shell makes it."""
    values = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    program(tmp_path / "bin", "leto", SHOW)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **values, **given}
    command = [*container["command"], *container["args"]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return checked(json.loads(done.stdout), tmp_path)


def test_the_kubernetes_job(tmp_path: Path) -> None:
    service, job = documents("job.yaml")
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert pod["restartPolicy"] == "Never", "podFailurePolicy asks for it"
    (container,) = pod["containers"]
    failing = spec["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert failing["containerName"] == container["name"]
    assert set(failing["values"]) < {int(code) for code in ExitCode}
    assert ExitCode.AGENT_LOST not in failing["values"], "torchrun may start that elsewhere"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert pod["initContainers"][0]["command"] == ["leto", "doctor"]
    for index in range(spec["completions"]):
        arguments = told(container, tmp_path, JOB_COMPLETION_INDEX=str(index), POD_IP="10.0.0.7")
        assert int(arguments.nnodes) == spec["completions"]
        assert arguments.rdzv_endpoint == f"{name}-0.{pod['subdomain']}:29400"
        assert arguments.rdzv_conf == f"is_host={int(index == 0)}"
        assert (arguments.local_addr, arguments.metrics_address) == ("10.0.0.7", "10.0.0.7")
        assert arguments.metrics_port == container["ports"][0]["containerPort"]
        assert arguments.nproc_per_node == container["resources"]["limits"]["nvidia.com/gpu"]
        assert str(arguments.keep) in {mount["mountPath"] for mount in container["volumeMounts"]}
        assert arguments.job_id == name


def test_the_pytorchjob(tmp_path: Path) -> None:
    (job,) = documents("pytorchjob.yaml")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    nodes = sum(one["replicas"] for one in replicas.values())
    assert replicas["Master"]["replicas"] == 1
    for rank, role in ((0, "Master"), (nodes - 1, "Worker")):
        (container,) = replicas[role]["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        arguments = told(container, tmp_path, RANK=str(rank))
        assert (int(arguments.nnodes), arguments.node_rank) == (nodes, str(rank))
        assert arguments.master_addr == f"{job['metadata']['name']}-master-0"
        assert int(arguments.master_port) == container["ports"][0]["containerPort"]
        assert arguments.metrics_port == container["ports"][1]["containerPort"]


def test_torchrun_understands_what_is_handed_on(tmp_path: Path) -> None:
    """The options of both pages, as torchrun's own parser reads them."""
    run = pytest.importorskip("torch.distributed.run")
    _, job = documents("job.yaml")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    arguments = told(container, tmp_path, JOB_COMPLETION_INDEX="1", POD_IP="10.0.0.7")
    words = launch.torchrun_command(arguments)
    known = run.parse_args(words[words.index("leto_shadow.launcher") + 1 :])
    assert (known.nnodes, known.nproc_per_node, known.rdzv_conf) == ("2", "1", "is_host=0")
    assert known.training_script == "leto_shadow.agent_main"
