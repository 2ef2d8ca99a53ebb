"""Can this device go on? From what was observed of it, by tables (paper section 2.2, "hardware-operable").

A pure function: facts in, a judgement with its reasons out. The Xid table is NVIDIA's catalogue, each row
with the catalogue's name and its *immediate action*; `CLASS_OF` says which actions a job on the same GPU may
go on with. Sources: "Analyzing Xid Errors with the Xid Catalog" (docs.nvidia.com/deploy/xid-errors), whose
172 rows the table was checked against one by one, "GPU Memory Error Management"
(docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt), the NVML reference. Where these leave a choice, the row says
what was chosen; an operator's hook (`leto_shadow.classify_hook`) may overrule any of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import msgspec

__all__ = [
    "CLASS_OF",
    "XIDS",
    "Class",
    "DeviceFacts",
    "Judgement",
    "NvidiaAction",
    "Xid",
    "class_of_xid",
    "has_fatal_xid",
    "healed",
    "judge",
]


class Class(StrEnum):
    """The paper's two classes of failure."""

    HOF = "hof"
    """Hardware-operable: training can resume on the same GPU, without reset, repair or replacement."""
    FF = "ff"
    """Fatal: it cannot."""


class NvidiaAction(StrEnum):
    """The catalogue's immediate actions ("resolution buckets")."""

    IGNORE = "IGNORE"
    RESTART_APP = "RESTART_APP"
    FOLLOW = "follow the other Xid"
    """It accompanies another error, or tells of the recovery from one; that other one decides. (If nothing
    else is reported, WORKFLOW_XID_45 says: restart the fabric manager. But 45 comes with every process that
    is killed, and Leto kills.)"""
    CHECK_MECHANICALS = "CHECK_MECHANICALS"
    RESET_GPU = "RESET_GPU"
    XID_48 = "WORKFLOW_XID_48"
    """Alone: RESET_GPU. With 63 or 64: drain and reset; the class of 64 is its own."""
    NVLINK = "WORKFLOW_NVLINK_ERR"
    """It depends on register bits, which NVML's events do not carry. (144 to 150: WORKFLOW_NVLINK5_ERR.)"""
    CHECK_UVM = "CHECK_UVM"
    """RESET_GPU if unified memory is in use, which nobody here knows; otherwise IGNORE."""
    RESTART_VM = "RESTART_VM"
    RESTART_BM = "RESTART_BM"
    UPDATE_SWFW = "UPDATE_SWFW"
    CONTACT_SUPPORT = "CONTACT_SUPPORT"


CLASS_OF: dict[NvidiaAction, Class] = {
    NvidiaAction.IGNORE: Class.HOF,
    NvidiaAction.RESTART_APP: Class.HOF,
    NvidiaAction.FOLLOW: Class.HOF,
    NvidiaAction.CHECK_MECHANICALS: Class.HOF,  # slower clocks until somebody has looked at the cables
    NvidiaAction.RESET_GPU: Class.FF,
    NvidiaAction.XID_48: Class.FF,  # but see `class_of_xid`, for this and the next two
    NvidiaAction.NVLINK: Class.FF,  # in doubt: a world over a bad link would fail again at once
    NvidiaAction.CHECK_UVM: Class.FF,
    NvidiaAction.RESTART_VM: Class.FF,
    NvidiaAction.RESTART_BM: Class.FF,
    NvidiaAction.UPDATE_SWFW: Class.FF,
    NvidiaAction.CONTACT_SUPPORT: Class.FF,
}


@dataclass(frozen=True)
class Xid:
    """One row: what it is called, and what NVIDIA has one do at once."""

    name: str
    action: NvidiaAction


def _rows(*rows: tuple[NvidiaAction, dict[int, str]]) -> dict[int, Xid]:
    return {number: Xid(name, action) for action, names in rows for number, name in names.items()}


XIDS: dict[int, Xid] = _rows(
    (
        NvidiaAction.RESTART_APP,
        {
            8: "GPU stopped processing (idle timeout of a channel)",
            11: "invalid or corrupted push buffer stream",
            13: "graphics engine exception",
            25: "invalid or illegal push buffer stream",
            31: "GPU memory page fault",
            32: "invalid or corrupted push buffer stream (PBDMA)",
            60: "video processor exception",
            **dict.fromkeys((39, 40, 41, 70, 71, 72, 75, 76, 77, 85), "copy engine exception"),
            **dict.fromkeys(range(126, 136), "copy engine exception"),
            **dict.fromkeys((68, 83, 84, 88, 89, 96, 97, 98), "video decoder exception"),
            **dict.fromkeys((82, *range(99, 106)), "JPEG engine exception"),
            **dict.fromkeys((86, 139), "optical flow engine exception"),
            69: "graphics engine class error",
            80: "corrupted data sent to the GPU",
            94: "contained memory error",
        },
    ),
    (
        NvidiaAction.IGNORE,
        {
            14: "a made-up error",
            37: "driver firmware error",
            38: "driver firmware watchdog",
            43: "reset of a channel by a program's fault",
            44: "graphics engine fault during a context switch",
            63: "a row of memory is marked for remapping, or a page retired",
            66: "illegal access by a driver",
            67: "verification error of a driver",
            92: "high rate of corrected ECC errors",
            93: "wear of the InfoROM",
            106: "test message",
            107: "test message",
            108: "NVLink remote translation error",
            121: "C2C link error, corrected",
            137: "NVLink privilege error",
            141: "fast path error",
            147: "NVLink TREX error",  # as are all rows of the catalogue's decoding of it, and of 148
            148: "NVLink port control error",
            157: "a resource could not be retired",
            160: "a channel is retired",
            161: "a channel could not be retired",
        },
    ),
    (
        NvidiaAction.FOLLOW,
        {45: "channels removed, as after a kill", 154: "the driver's advice on recovery has changed"},
    ),
    (NvidiaAction.CHECK_MECHANICALS, {54: "reduced clocks: auxiliary power is not connected"}),
    (
        NvidiaAction.RESET_GPU,
        {
            46: "the GPU stopped processing",
            62: "the GPU's microcontroller halted",
            64: "a bad row or page of memory could not be replaced",
            95: "uncontained memory error",
            109: "context switch timeout",
            110: "security fault",
            119: "the GPU's system processor does not answer",
            120: "the GPU's system processor failed",
            136: "NVLink training failed",
            140: "unrecovered ECC error",
            143: "the GPU could not be initialised",
            155: "NVLink error defined by software",
            156: "a resource was retired, which a reset completes",
            158: "fatal timeout in the GPU",
        },
    ),
    (NvidiaAction.XID_48, {48: "double-bit ECC error"}),
    (NvidiaAction.CHECK_UVM, {159: "CHI non-data error"}),
    (
        NvidiaAction.NVLINK,
        {
            74: "NVLink error",
            144: "NVLink SAW error",
            145: "NVLink RLW error",
            146: "NVLink TLW error",
            149: "NVLink NETIR error",
            150: "NVLink MSE error",
        },
    ),
    (NvidiaAction.UPDATE_SWFW, {78: "a virtual GPU does not start"}),
    (NvidiaAction.RESTART_BM, {79: "the GPU has fallen off the bus"}),
    (NvidiaAction.CONTACT_SUPPORT, {142: "video encoder exception"}),
    (NvidiaAction.RESTART_VM, {151: "key rotation error"}),
)
"""Those of Ampere and later that the catalogue gives an action. Others are taken for operable, which the
limit on repeated failures bounds."""


class DeviceFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was observed of one rank's device when its trainer had failed. Counts are since the rank's state
    manager began to use the device; None where the driver does not tell.

    ``answers``: the driver answered; ``timed_out``: it did not within the deadline, and the watch process
    that asked was killed; ``error``: what came instead of an answer."""

    device: str = ""
    answers: bool = True
    timed_out: bool = False
    error: str = ""
    xids: tuple[int, ...] = ()
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    retirement_pending: bool = False
    recovery: int | None = None
    """What the driver asks for (`RECOVERY`); None where it does not tell."""
    injected: bool = False
    """Made up by `leto inject fatal` or a schedule; nothing was observed."""


@dataclass(frozen=True)
class Judgement:
    """``reasons``: those for a fatal class, if there is one; otherwise whatever was worth a word."""

    verdict: Class
    reasons: tuple[str, ...] = ()

    @property
    def operable(self) -> bool:
        """Whether a job may go on with the device."""
        return self.verdict is Class.HOF


_ON_ITS_WORD = frozenset({NvidiaAction.XID_48, NvidiaAction.NVLINK, NvidiaAction.CHECK_UVM})
"""Actions that depend on what an Xid alone does not say. The driver sums up such errors as a recovery
action, where it tells (the catalogue's "Xid 154 linkage"; drivers from R565 on)."""


def class_of_xid(number: int, others: tuple[int, ...] = (), recovery: int | None = None) -> Class:
    """Return the class of one Xid. ``others``: all that the device reported, among which it may be.

    A double-bit error (48) is operable where it was contained (94) or a row was remapped for it (63): the
    page is offline, and the job goes on without it. ``recovery``: what the driver asks for.
    """
    row = XIDS.get(number)
    if row is None:
        return Class.HOF
    if row.action is NvidiaAction.XID_48 and {63, 94} & set(others):
        return Class.HOF
    if row.action in _ON_ITS_WORD and recovery is not None:
        return RECOVERY.get(recovery, (Class.FF, ""))[0]
    return CLASS_OF[row.action]


@dataclass(frozen=True)
class _Sign:
    """One observation besides Xids: when it holds, and what it means."""

    holds: Callable[[DeviceFacts], bool]
    verdict: Class
    text: str


RECOVERY: dict[int, tuple[Class, str]] = {
    0: (Class.HOF, ""),
    1: (Class.FF, "the driver asks for a reset of the GPU"),
    2: (Class.FF, "the driver asks for a reboot of the node"),
    3: (Class.FF, "the driver asks to end all peer-to-peer traffic"),
    # Less of it works, and what runs is safe: what contained memory errors leave behind.
    4: (Class.HOF, "the driver asks for a reset when the work is done"),
}
"""NVML's recovery actions (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION). Source: "GPU Memory Error Management", page
"Error Recovery and Response Flags"."""


def _recovery(facts: DeviceFacts) -> tuple[Class, str]:
    action = facts.recovery or 0
    return RECOVERY.get(action, (Class.FF, f"the driver asks for recovery action {action}"))


_SIGNS = (
    _Sign(lambda f: f.timed_out, Class.FF, "the driver did not answer in time"),
    _Sign(lambda f: not f.answers and not f.timed_out, Class.FF, "the device cannot be reached"),
    _Sign(
        lambda f: f.remap_failed,
        Class.FF,
        "a bad row of memory could not be replaced: reset or replace the GPU",
    ),
    # NVML's reference: containment and page offlining take care until the next reset.
    _Sign(lambda f: f.remap_pending, Class.HOF, "a row of memory is remapped at the next reset"),
    _Sign(lambda f: f.retirement_pending, Class.HOF, "a page of memory is retired at the next reset"),
    # Which error it was, an Xid says; the pages are found by reading (`leto_shadow.localization`).
    _Sign(lambda f: bool(f.ecc_uncorrected), Class.HOF, "uncorrected ECC errors were counted"),
)


def judge(facts: DeviceFacts) -> Judgement:
    """Return the class that the facts call for: fatal if any of them does, and why."""
    error = "" if facts.answers else f": {facts.error}"
    found = [(sign.verdict, sign.text + error) for sign in _SIGNS if sign.holds(facts)]
    if facts.recovery:
        found.append(_recovery(facts))
    for number in dict.fromkeys(facts.xids):
        row = XIDS.get(number)
        what = (
            f"{row.name} ({row.action.value})"
            if row is not None
            else "not in the catalogue's list of actions"
        )
        found.append((class_of_xid(number, facts.xids, facts.recovery), f"Xid {number}: {what}"))
    fatal = [text for verdict, text in found if verdict is Class.FF]
    prefix = f"{facts.device}: " if facts.device else ""
    reasons = tuple(prefix + text for text in (fatal or [text for _, text in found]))
    return Judgement(Class.FF if fatal else Class.HOF, reasons)


def healed(now: DeviceFacts, *, after_xid: bool) -> Judgement:
    """Can work be given again to a device that could not go on? ``after_xid``: it had reported a fatal Xid.

    More is asked than of a device that is at work: the driver must not ask for anything, not even for a reset
    when it is convenient, and after an Xid it must be able to say so.
    """
    found = judge(now)
    if not found.operable:
        return found
    prefix = f"{now.device}: " if now.device else ""
    if now.recovery:
        return Judgement(Class.FF, (prefix + _recovery(now)[1],))
    if now.recovery is None and after_xid:
        return Judgement(Class.FF, (f"{prefix}the driver does not say whether it was reset",))
    return found


def has_fatal_xid(facts: DeviceFacts) -> bool:
    """Whether an Xid that was really reported calls for more than going on."""
    return not facts.injected and any(
        class_of_xid(one, facts.xids, facts.recovery) is Class.FF for one in facts.xids
    )
