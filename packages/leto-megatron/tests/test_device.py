"""Where pages and model are: mappings made ahead of a takeover, and combinations that are refused."""

from __future__ import annotations

import dataclasses
import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leto_megatron import device, process, storage, trainer, warm
from leto_megatron.config import PRESETS, Config, ConfigError
from leto_megatron.optimizer import make_plan
from leto_megatron.plan import Pool
from leto_megatron.storage import Layout, LayoutError, ShardSpec
from leto_megatron.trainer import MegatronTrainer
from leto_rmp import AllocationSpec, Client, Kind, PoolConfig, Role, spawn_manager

PAGE, MIB = 4096, 1 << 20
SPEC = AllocationSpec("arena", 4 * PAGE, Kind.RETAINED)
POOL = PoolConfig(page_bytes=PAGE, data_pages=8, tier1_pages=2, tier2_pages=1)


def context(folder: Path, generation: int) -> Any:
    """What of a `Context` is looked at; rank 0 of a run in ``folder``."""
    return SimpleNamespace(
        run_dir=folder,
        rank=0,
        generation=generation,
        manager_socket=str(folder / "rank0" / "manager.sock"),
    )


def start(folder: Path) -> Any:
    return spawn_manager(folder / "rank0", "test-device", 0, POOL)


def test_pages_mapped_ahead_are_the_writers(tmp_path: Path) -> None:
    with start(tmp_path) as manager:
        with Client.connect(manager.socket_path) as first:
            first.attach(Role.WRITER, 0)
            first.allocate([SPEC])["arena"].pages[:] = 7
        ahead = device.map_ahead(context(tmp_path, 1))
        assert ahead is not None
        assert ahead.role is Role.OBSERVER
        with device.attach(context(tmp_path, 1), ahead) as client:
            assert client is ahead
            assert client.role is Role.WRITER
            pages = client.allocate([SPEC])["arena"].pages
            assert (pages == 7).all()
            pages[:] = 8


def test_a_manager_that_was_replaced_is_attached_anew(tmp_path: Path) -> None:
    with start(tmp_path):
        ahead = device.map_ahead(context(tmp_path, 1))
    assert ahead is not None
    with start(tmp_path) as manager, device.attach(context(tmp_path, 1), ahead) as client:
        assert client is not ahead
        assert client.manager_pid == manager.pid
        assert client.role is Role.WRITER


def test_without_a_manager_nothing_is_mapped_ahead(tmp_path: Path) -> None:
    assert device.map_ahead(context(tmp_path, 0)) is None


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    """I-4: mappings made ahead give no right to write."""
    with start(tmp_path) as manager, Client.connect(manager.socket_path) as alive:
        ahead = device.map_ahead(context(tmp_path, 1))
        alive.attach(Role.WRITER, 0)
        with pytest.raises(Exception, match="writer of generation 0"):
            device.attach(context(tmp_path, 1), ahead)


def test_pages_on_gpus_need_a_model_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trainer._check_backend("host")
    with pytest.raises(ConfigError, match="torch finds none"):
        trainer._check_backend("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    trainer._check_backend("cuda")
    with pytest.raises(ConfigError, match="--backend"):
        trainer._check_backend("host")


def test_every_life_of_a_trainer_has_the_same_settings_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first trainer, a later shadow, and one that survived and connects again: sums have one order."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(process.cpu, "install", lambda: None)
    monkeypatch.setattr(process, "_deterministic", lambda: None)
    given = {name: value for name, value in os.environ.items() if "NCCL_" not in name}
    given["NCCL_ALGO"] = "Tree"  # what the operator sets stands

    def life(environment: dict[str, str], connects: int) -> dict[str, str]:
        monkeypatch.setattr(os, "environ", environment)
        process.prepare_process()
        for _ in range(connects):
            process.stay_on_loopback()
        return {name: value for name, value in environment.items() if "NCCL_" in name}

    first = life(dict(given), 1)
    assert first["NCCL_ALGO"] == "Tree"
    assert set(process.NCCL_SETTINGS) <= set(first)
    assert all(first[name] == value for name, value in process.NCCL_SETTINGS.items() if name != "NCCL_ALGO")
    assert life(dict(given), 1) == first
    assert life(dict(given), 3) == first
    without = {name: value for name, value in given.items() if name != "NCCL_ALGO"}
    assert life(without, 1) != first, "and the test would notice"


def test_groups_of_the_same_ranks_are_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def __init__(self, *ranks: int, backend: str = "nccl") -> None:
            self.ranks, self.backend = list(ranks), backend

    monkeypatch.setattr(process.dist, "ProcessGroup", Group)
    monkeypatch.setattr(process.dist, "get_process_group_ranks", lambda group: group.ranks)
    names: dict[str, Any] = {
        "_TENSOR_MODEL_PARALLEL_GROUP": Group(0, 1),
        "_MODEL_PARALLEL_GROUP": Group(0, 1),
        "_DATA_PARALLEL_GROUP": Group(0, 2),
        "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": Group(0, 1, 2, 3),
        "_CONTEXT_PARALLEL_GROUP": Group(0),
        "_PIPELINE_MODEL_PARALLEL_GROUP": Group(0),
        "_DATA_PARALLEL_GROUP_GLOO": Group(0, 2, backend="gloo"),
        "_EMBEDDING_GROUP": None,
        "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": [0, 1],
    }
    before = dict(names)
    assert process.share_groups(names, lambda group: group.backend == "nccl") == 4
    assert names["_TENSOR_MODEL_PARALLEL_GROUP"] is names["_MODEL_PARALLEL_GROUP"]
    assert names["_PIPELINE_MODEL_PARALLEL_GROUP"] is names["_CONTEXT_PARALLEL_GROUP"]
    assert names["_DATA_PARALLEL_GROUP"] is not names["_DATA_PARALLEL_GROUP_GLOO"]
    for name, group in names.items():
        assert getattr(group, "ranks", group) == getattr(before[name], "ranks", before[name])


def test_the_stacks_of_a_parked_shadow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there is restored, once; a driver that refuses costs memory only, until it is needed again."""
    limits, free = [1024], [10 * MIB, 456 * MIB]
    monkeypatch.setattr(warm, "_is_on_device", lambda: True)
    monkeypatch.setattr(warm, "_free_bytes", lambda: free[len(limits) % 2 == 0])
    monkeypatch.setattr(warm, "_threads", lambda: 132 * 2048)
    monkeypatch.setattr(warm, "_stack_limit", lambda: limits[-1])
    monkeypatch.setattr(warm, "_set_stack_limit", limits.append)
    warm.unpark()
    assert limits == [1024], "it was not parked"
    assert warm.park() == 446 * MIB
    assert warm.park() == 0, "once is enough"
    warm.unpark()
    warm.unpark()
    assert limits == [1024, warm._PARKED_STACK, 1024]

    def refuse(_nbytes: int) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(warm, "_set_stack_limit", refuse)
    assert warm.park() == 0
    warm.unpark()


@pytest.mark.parametrize(("seen", "counted"), [(-500, 264), (300, 300), (50_000, 4 * 264)])
def test_what_is_parked_is_measured_within_reason(
    seen: int, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others take and give memory of the device at the same moment."""
    monkeypatch.setattr(warm, "_parked", None)
    monkeypatch.setattr(warm, "_is_on_device", lambda: True)
    monkeypatch.setattr(warm, "_free_bytes", iter([1000 * MIB, (1000 + seen) * MIB]).__next__)
    monkeypatch.setattr(warm, "_threads", lambda: 132 * 2048)
    monkeypatch.setattr(warm, "_stack_limit", lambda: 1024)
    monkeypatch.setattr(warm, "_set_stack_limit", lambda _nbytes: None)
    assert warm.park() == counted * MIB


@pytest.mark.parametrize(
    ("answer", "error"), [("OUT_OF_MEMORY", torch.OutOfMemoryError), ("UNKNOWN", RuntimeError), ("", None)]
)
def test_an_unpark_that_is_refused_says_for_want_of_what(
    answer: str, error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An OutOfMemoryError is what Leto takes for a lack of memory (`takeover_refused`); it stays parked."""
    results = SimpleNamespace(CUDA_SUCCESS="", CUDA_ERROR_OUT_OF_MEMORY="OUT_OF_MEMORY")
    driver = SimpleNamespace(
        CUresult=results,
        CUlimit=SimpleNamespace(CU_LIMIT_STACK_SIZE=0),
        cuCtxSetLimit=lambda _what, _nbytes: (answer,),
    )
    monkeypatch.setattr(warm, "_driver", lambda: driver)
    monkeypatch.setattr(warm, "_parked", 1024)
    if error is None:
        warm.unpark()
        assert warm._parked is None
        return
    with pytest.raises(RuntimeError) as raised:
        warm.unpark()
    assert (type(raised.value), warm._parked) == (error, 1024)


@pytest.mark.parametrize(
    ("backend", "setting", "waits", "parked"),
    [
        ("cuda", None, True, 1),
        ("cuda", "1", True, 1),
        ("cuda", "0", True, 0),
        ("cuda", None, False, 0),
        ("host", None, True, 0),
    ],
)
def test_shadows_on_gpus_that_will_wait_are_parked_unless_told_otherwise(
    backend: str,
    setting: str | None,
    waits: bool,
    parked: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    told: list[Any] = []
    for where, name in (
        (process, "form_groups"),
        (process, "warm_groups"),
        (process, "stay_on_loopback"),
        (warm, "iterate_once"),
        (warm, "unpark"),
        (warm, "park"),
        (trainer, "Skeleton"),
    ):
        monkeypatch.setattr(where, name, lambda *_args, name=name, **_more: calls.append(name))
    monkeypatch.setattr(trainer.device, "map_ahead", lambda _ctx: None)
    monkeypatch.delenv(warm.PARK_VARIABLE, raising=False)
    if setting is not None:
        monkeypatch.setenv(warm.PARK_VARIABLE, setting)
    ctx: Any = SimpleNamespace(
        backend=backend,
        rank=0,
        world_size=2,
        local_world_size=2,
        store=None,
        waits=waits,
        parked=told.append,
    )
    try:
        MegatronTrainer(Config(), tmp_path).connect(ctx)
        assert gc.get_freeze_count() > 0, "a collection in the takeover would walk all of it"
    finally:
        gc.unfreeze()
    assert calls.count("park") == len(told) == parked
    assert calls.index("unpark") < calls.index("Skeleton")
    if parked:
        assert calls[-1] == "park", "kernels run before it"


def test_a_takeover_that_fails_leaves_nothing_to_the_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is frozen is never collected: a survivor could not give up its views of retained memory."""
    active = MegatronTrainer(Config(), tmp_path)
    active._skeleton = SimpleNamespace()  # type: ignore[assignment]

    def refuse(*_args: Any) -> None:
        raise LayoutError("no")

    monkeypatch.setattr(device, "attach", refuse)
    gc.freeze()
    with pytest.raises(LayoutError, match="no"):
        active.train(SimpleNamespace(backend="host"))  # type: ignore[arg-type]
    assert gc.get_freeze_count() == 0


def test_the_plan_is_made_once_for_a_pool(tmp_path: Path) -> None:
    layout = storage.Layout((storage.ShardSpec("all", 5000, 0, 0),), 5000, 0, 1, (0,))
    skeleton: Any = SimpleNamespace(layout=layout)
    active = MegatronTrainer(Config(), tmp_path)
    plan = active._plan_for(skeleton, POOL, 2)
    assert active._plan_for(skeleton, POOL, 2) is plan
    other = PoolConfig(page_bytes=PAGE, data_pages=16, tier1_pages=2, tier2_pages=1)
    assert active._plan_for(skeleton, other, 2).config == other, (
        "a manager that was replaced has another pool"
    )


def test_the_log_says_how_chunks_are_updated() -> None:
    def described(**memory: Any) -> str:
        return device.describe(SimpleNamespace(memory=SimpleNamespace(**memory)))  # type: ignore[arg-type]

    library = SimpleNamespace(build="machine code", why="leto-ec chose it")
    assert described() == "chunks are updated on the host"
    assert "one kernel each (machine code: leto-ec" in described(fused=SimpleNamespace(library=library))
    assert described(fused=None, no_kernel="because") == "chunks are updated by separate operations: because"


def test_the_scheme_follows_the_backend() -> None:
    pools = [PoolConfig(backend=backend) for backend in ("host", "cuda")]
    assert [Config().scheme_on(pool) for pool in pools] == ["undo", "slots"]
    assert [Config(scheme="undo").scheme_on(pool) for pool in pools] == ["undo", "undo"]
    assert Config(scheme="slots").scheme_on(pools[0]) == "slots"
    with pytest.raises(ConfigError, match="expected undo, slots, or auto"):
        Config(scheme="other")
    assert Config(scheme="undo").digest(2) == Config(scheme="slots", chunk_pages=30).digest(2)


GPU = PoolConfig(backend="cuda")
FP32 = {"precision": "fp32", "distributed_optimizer": False}


@pytest.mark.parametrize(
    ("changes", "pool", "why"),
    [
        ({}, dataclasses.replace(GPU, tier1_pages=4), "updates 16 parity pages, the pool has 4"),
        ({}, dataclasses.replace(GPU, data_pages=15), "does not fit a group of data_pages=15"),
        ({"chunk_pages": 12}, GPU, "multiple of the 15 pages"),
        (FP32, GPU, "are the masters"),
    ],
)
def test_what_the_kernel_would_refuse_takes_the_other_scheme_up_front(
    changes: dict[str, Any], pool: PoolConfig, why: str
) -> None:
    """Slots without the kernel are two to three times as slow; some such plans cannot even be made."""
    config = Config(**changes)
    assert (config.scheme_on(pool), why in config.why_undo(pool)) == ("undo", True)
    assert config.chunk_pages_on(pool, 2) == config.chunk_pages, "the updater's default, or what was asked"
    masters = config.precision == "fp32"
    layout = Layout((ShardSpec("a", 9, 0, 0, 0),), 9, 18, 1, (0,), (0,), {} if masters else {"a": 0})
    make_plan(layout, pool, config.scheme_on(pool), config.chunk_pages_on(pool, 2)).specs()
    updater: Any = SimpleNamespace(memory=SimpleNamespace(fused=None))
    words = device.describe(updater, config.why_undo(pool))
    assert words.startswith("chunks are updated by separate operations, scheme undo: ")
    assert why in words
    assert Config(scheme="slots").scheme_on(pool) == "slots", "who asks for it gets it"


def test_a_gpu_pool_that_the_kernel_takes_has_slots() -> None:
    assert (Config().why_undo(GPU), Config().scheme_on(GPU)) == ("", "slots")
    assert dataclasses.replace(Config(), precision="fp32").scheme_on(GPU) == "slots", "ZeRO-1 copies them"


def test_chunks_have_one_size_on_all_ranks_of_a_job_on_gpus() -> None:
    """They suit the model, not the rank's share of it; small models have the smallest."""
    gpu = PoolConfig(backend="cuda")
    paper, small = PRESETS["paper"], PRESETS["demo-cuda"]
    assert [paper.chunk_pages_on(gpu, ranks) for ranks in (1, 2, 8)] == [240, 240, 75]
    assert [small.chunk_pages_on(gpu, ranks) for ranks in (1, 2)] == [30, 15]
    whole = dataclasses.replace(paper, distributed_optimizer=False)
    assert whole.chunk_pages_on(gpu, 8) == 240
    stages = dataclasses.replace(paper, pipeline_parallel=2)
    assert [stages.chunk_pages_on(gpu, ranks) for ranks in (2, 4)] == [240, 150]
    for config, backend in ((paper, "host"), (dataclasses.replace(paper, scheme="undo"), "cuda")):
        assert config.chunk_pages_on(PoolConfig(backend=backend), 2) == 0, "the updater's default"
    assert dataclasses.replace(paper, chunk_pages=480).chunk_pages_on(gpu, 2) == 480


def test_drills_count_chunks_as_the_trainer_lays_them_out() -> None:
    config, pool = PRESETS["paper"], Pool(2 << 20, 1024, 16, 1, "cuda")
    sizes = PoolConfig(backend="cuda")
    numel = config.owned_numel(2) + 12_345
    layout = Layout((ShardSpec("a", numel, 0, 0, 0),), numel, 2 * numel, 1, (0,), (0,), {"a": 0})
    plan = make_plan(layout, sizes, "slots", config.chunk_pages_on(sizes, 2))
    assert plan.geometry == pool.geometry(numel, 2, config)
    assert plan.pages_per_chunk == 240


def test_an_optimizer_with_other_bits_is_refused() -> None:
    class FusedAdam(torch.optim.AdamW):
        """As TransformerEngine and Apex have it."""

    def parts(kind: type[torch.optim.AdamW]) -> Any:
        inner = SimpleNamespace(optimizer=kind([torch.zeros(1)]))
        return SimpleNamespace(optimizer=SimpleNamespace(chained_optimizers=[inner]))

    storage._check_optimizer(parts(torch.optim.AdamW))
    with pytest.raises(LayoutError, match=r"would step with .*FusedAdam"):
        storage._check_optimizer(parts(FusedAdam))


class Cache:
    """PyTorch's, as far as it is asked here: so much is free on the device, and what was taken at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.taken: list[int] = []
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 1 << 40))
        monkeypatch.setattr(torch, "empty", self._empty)

    def _empty(self, nbytes: int, *, dtype: torch.dtype, device: str) -> None:
        assert (dtype, device) == (torch.uint8, "cuda")
        self.taken.append(nbytes)


@pytest.mark.parametrize(
    ("setting", "free_mib", "taken_mib"),
    [
        (None, 9000, 2000),
        (None, 4000, 2000),
        (None, 3999, 0),
        ("auto", 4000, 2000),
        ("0", 9000, 0),
        ("3000", 9000, 3000),
        ("3000", 4024, 3000),
        ("3000", 4023, 0),
    ],
)
def test_the_cache_grows_at_once_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, free_mib: int, taken_mib: int
) -> None:
    """A GiB more than asked for must be free: what is not free would be taken from the next shadow. Of what
    the predecessor had, 2000 MiB, there must be twice as much."""
    monkeypatch.delenv(warm.CACHE_VARIABLE, raising=False)
    if setting is not None:
        monkeypatch.setenv(warm.CACHE_VARIABLE, setting)
    cache = Cache(monkeypatch, free_mib << 20)
    assert warm.grow_cache(2000 << 20) == taken_mib << 20
    assert cache.taken == [taken_mib << 20] * bool(taken_mib)


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("setting", ["auto", "3000"])
def test_a_cache_whose_blocks_stay_whole_does_not_grow_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str, setting: str
) -> None:
    """One large block would then serve nobody: training would hold its memory twice."""
    monkeypatch.setenv(warm.CACHE_VARIABLE, setting)
    cache = Cache(monkeypatch, 9000 << 20)
    monkeypatch.setenv(variable, "garbage_collection_threshold:0.8,max_split_size_mb:512")
    with caplog.at_level("INFO"):
        assert warm.grow_cache(2000 << 20) == 0
    assert cache.taken == []
    assert "max_split_size_mb keeps large blocks whole, so the cache grows piece by piece" in caplog.text
    monkeypatch.setenv(variable, "garbage_collection_threshold:0.8")
    assert warm.grow_cache(2000 << 20) == cache.taken[0]


def test_the_first_trainer_has_nobodys_cache_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(warm.CACHE_VARIABLE, raising=False)
    cache = Cache(monkeypatch, 9000 << 20)
    assert warm.grow_cache(warm.CacheHint.left(SimpleNamespace(hints={}))) == 0  # type: ignore[arg-type]
    assert cache.taken == []


def test_a_trainer_leaves_word_of_its_cache_when_it_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at after iterations 1, 2, 4, 8, ...; what is on the host leaves none."""
    sizes = iter([100, 300, 300, 200, 301])
    key = "reserved_bytes.large_pool.current"
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {key: next(sizes)})
    told: list[float] = []
    for backend, iterations in (("host", 4), ("cuda", 16)):
        ctx: Any = SimpleNamespace(backend=backend, hint=lambda cache_bytes: told.append(cache_bytes))
        hint = warm.CacheHint(ctx)
        for _ in range(iterations):
            hint.after_iteration()
    assert told == [100, 300, 301]
    assert list(sizes) == []
    later: Any = SimpleNamespace(hints={warm.CacheHint.NAME: told[-1]})
    assert warm.CacheHint.left(later) == 301


@pytest.mark.parametrize(("backend", "grown"), [("host", []), ("cuda", ["cache"])])
def test_the_cache_grows_before_memory_is_attached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str, grown: list[str]
) -> None:
    calls: list[str] = []

    def refuse(*_: object) -> None:
        calls.append("attach")
        raise LayoutError("no")

    monkeypatch.setattr(warm, "grow_cache", lambda _predecessor: calls.append("cache"))
    monkeypatch.setattr(device, "attach", refuse)
    active = MegatronTrainer(Config(), tmp_path)
    active._skeleton = SimpleNamespace()  # type: ignore[assignment]
    ctx: Any = SimpleNamespace(backend=backend, hints={})
    with pytest.raises(LayoutError, match="no"):
        active.train(ctx)
    assert calls == [*grown, "attach"]


@pytest.mark.parametrize("setting", ["-1", "many", "1.5", ""])
def test_what_is_no_number_of_mib_is_refused_ahead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str
) -> None:
    monkeypatch.setenv(warm.CACHE_VARIABLE, setting)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ctx: Any = SimpleNamespace(backend="cuda")
    with pytest.raises(ConfigError, match="LETO_CACHE_MIB must be auto or a number"):
        MegatronTrainer(Config(), tmp_path).prepare(ctx)
