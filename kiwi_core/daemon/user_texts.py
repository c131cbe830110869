"""The texts of notices to users, in plain words: what happened, why, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core.states import GateOnly, Notice, Reason
from kiwi_core.wire.words import DAEMON_ENDED

if TYPE_CHECKING:
    from kiwi_core.daemon.roster.registry import SessionRecord
    from kiwi_core.gpu.ownable import OwnershipObjection
    from kiwi_core.gpu.proofs import Proof

NAMELESS = (
    "NVML does not show how much GPU memory each program has here (a PID namespace of its own, as "
    "in a container, or a machine without these figures). Kiwi goes by what its library counts in "
    "each program; a program without the library gets the GPU alone."
)

WITHOUT_NVML = (
    "NVML answers nothing, so free GPU memory is asked of the driver itself. See whether "
    "`nvidia-smi` works."
)

_REASONS = {
    Reason.LOCK_TIMEOUT: "it did not come to rest in time (a very long GPU kernel, perhaps)",
    Reason.DRAINING: "work that it has already given to the GPU must end first; its new work waits",
    Reason.NO_ROOM: "the GPU had not enough free memory",
    Reason.NO_HOST_MEMORY: "system RAM has no room for it",
    Reason.NO_JOB_MEMORY: "its job or container has too little RAM for it",
    Reason.UNSUPPORTED: "the driver cannot move this program's memory",
    Reason.NOT_PERMITTED: "the daemon has no permission to",
    Reason.DRIVER: "the driver refused",
    Reason.GONE: "the program ended meanwhile",
    Reason.STOPPED: "it does not run",
}

_WORDS: dict[Notice, tuple[str, str]] = {
    Notice.SUSPENDED: (
        "This cell was suspended because its turn on the GPU ended; it goes on by itself.",
        "",
    ),
    Notice.RESUMED: ("This cell has the GPU again.", ""),
    Notice.SERIALISING: (
        "The notebooks that use the GPU no longer fit together: they take turns from now on.",
        "",
    ),
    Notice.PAGE_OUT_REFUSED: (
        "The GPU memory of this program could not be moved out, so others wait longer.",
        "",
    ),
    Notice.LITTLE_RAM: (
        (
            "The job or container of this program has too little RAM for its GPU memory to be "
            "moved out, so others wait until it frees GPU memory or ends."
        ),
        "Free GPU memory that is not needed, or start the job again with more RAM.",
    ),
    Notice.PAGE_IN_REFUSED: (
        (
            "The GPU memory of this program could not be brought back yet; nothing is lost, and "
            "Kiwi tries again."
        ),
        "If it stays so, `kiwi doctor` and the daemon's log say more.",
    ),
    Notice.BLOCKED_HOST_MEMORY: (
        (
            "Waiting because system RAM has no room for the GPU memory that would have to be moved "
            "out first; nothing is lost."
        ),
        "Restart a notebook that is no longer needed, or free system RAM.",
    ),
    Notice.BLOCKED_REFUSED: (
        (
            "Waiting because the GPU memory of another notebook cannot be moved out at the moment; "
            "Kiwi tries again."
        ),
        "It also goes on as soon as that notebook ends or frees its memory.",
    ),
    Notice.BLOCKED_OUTSIDE: (
        "Waiting because programs outside Kiwi hold GPU memory that this program needs.",
        "`nvidia-smi` shows them; start them with `kiwi run` to let them share fairly.",
    ),
    Notice.BLOCKED_UNGUARDED: (
        (
            "Waiting for a program that has no gate of Kiwi's, so it cannot be stopped in the "
            "middle of its work: its turn lasts until that is done."
        ),
        "`kiwi status` names it if it is yours, and says how to start it with the gate.",
    ),
    Notice.STOPPED: (
        "This program is stopped and takes no turn; it keeps its place in the queue.",
        (
            "It goes on with `fg` or `kill -CONT`, or when its debugger or freezer, or whoever "
            "checkpointed it, lets it go."
        ),
    ),
    Notice.KEPT_OUT: (
        "This session loses nothing, but is kept out of the GPU until `kiwi resume`.",
        "Whoever suspended it, or an admin, lets it go on.",
    ),
    Notice.STUCK: (
        "A driver call that moves the GPU memory of this program hangs; the others go on.",
        (
            "If it stays so, try `nvidia-smi`. Where that hangs, too, the whole driver does not "
            "answer, and a restart of this program does not help. Otherwise restart it (in a "
            "notebook: its kernel)."
        ),
    ),
    Notice.UNSTUCK: ("The driver call that hung came back; this program goes on.", ""),
    Notice.LOST: (
        "The contents of this program's GPU memory are lost.",
        (
            "Start it again (in a notebook: restart the kernel and run its cells again); its files "
            "and the other programs are safe."
        ),
    ),
}


_PAGE_IN_REMEDIES: dict[str, str] = {
    Reason.NO_ROOM: (
        "If it stays so, look in `kiwi status` for programs outside Kiwi that use the GPU."
    ),
    Reason.STOPPED: _WORDS[Notice.STOPPED][1],
    Reason.LOCK_TIMEOUT: "It is tried again by itself, as soon as the driver answers.",
    Reason.NOT_PERMITTED: "`kiwi doctor` says which right the daemon lacks.",
    Reason.GONE: "Start it again.",
}
"""Remedies by the reason with which the detail begins: why memory could not be brought back."""


def sentence(notice: Notice, detail: str = "") -> tuple[str, str]:
    """Return the notice for a user and what they can do: ``(text, remedy)``. Append ``detail``."""
    text, remedy = _WORDS[notice]
    if notice is Notice.PAGE_IN_REFUSED:
        remedy = _PAGE_IN_REMEDIES.get(detail.partition(":")[0], remedy)
    return _with_detail(text, detail), remedy


def _with_detail(text: str, detail: str) -> str:
    return f"{text.removesuffix('.')} ({detail.removesuffix('.')})." if detail else text


def unguarded(record: SessionRecord | None) -> str:
    """Return why a session (``None``: another user's) has no gate, what follows, what to do."""
    follows = "It is never stopped in the middle of its work, so others wait until that is done."
    if record is None:
        return f"A program of it uses the GPU without Kiwi's gate. {follows}"
    if record.ungated and (not record.bare or record.ref in record.bare):
        return f"{record.ungated} {follows}"  # its children lack the gate for the same reason
    if not record.bare:
        return f"A process of it uses the GPU without Kiwi's gate. {follows}"
    pids = ", ".join(str(ref.pid) for ref in sorted(record.bare, key=lambda ref: ref.pid))
    which = f"process {pids}" if len(record.bare) == 1 else f"processes {pids}"
    return (
        f"Without Kiwi's gate, the GPU is used by {which}: started with an environment that lacks "
        f"Kiwi's LD_PRELOAD, linked statically, or by a driver that was loaded before Kiwi. "
        f"{follows} Start it with `kiwi run`, and leave LD_PRELOAD as it is."
    )


_GATE_ONLY: Final[dict[GateOnly, tuple[str, str]]] = {
    GateOnly.TOOL: (
        "a debugger, a profiler or a checker is in this program",
        "Start the program without that to have its memory moved at full speed.",
    ),
    GateOnly.DIRECT: (
        "this program lets a disk, a network or the CPU use GPU memory directly",
        "Start it without GPUDirect Storage, GDRCopy and RDMA if it does not need them.",
    ),
    GateOnly.COHERENT: (
        "on this machine the CPU uses GPU memory like its own, so nobody can hold that up",
        "There is nothing to do: the driver moves it safely.",
    ),
    GateOnly.SEVERAL_GPUS: (
        "this program has used several GPUs before",
        (
            "Show it one GPU with CUDA_VISIBLE_DEVICES if it needs no more. Kiwi forgets this "
            "after 30 days."
        ),
    ),
    GateOnly.HOOKED: (
        "another preloaded library replaces functions of the driver",
        "Start it without that library in LD_PRELOAD or /etc/ld.so.preload if it is not needed.",
    ),
    GateOnly.IPC: (
        (
            "this program has asked for handles to share its GPU memory with other processes, "
            "which only memory of the driver's has"
        ),
        "There is nothing to do: its handles work now. Kiwi forgets this after 30 days.",
    ),
    GateOnly.CRASHED: (
        "this program has crashed within 10 s of a move by Kiwi's library before",
        (
            "Report the crash with the daemon's log if the program is sound without Kiwi. The next "
            "version of Kiwi tries again."
        ),
    ),
    GateOnly.UNREADABLE: (
        "the Kiwi daemon may not see what else is in this program",
        "Run the daemon as root or as the program's user, and in its PID namespace.",
    ),
    GateOnly.DOUBTED: (
        "the GPU has gained far less than Kiwi's library said that it had moved",
        "Start the program again, and report this with the daemon's log if it comes back.",
    ),
    GateOnly.REFUSED: (
        "Kiwi's library could not move it out, twice",
        "Start the program again, and report this with the daemon's log if it comes back.",
    ),
    GateOnly.LATE: (
        "the Kiwi daemon did not answer within a quarter of a second when the program began",
        "Start the program again; see whether the machine is overloaded if this lasts.",
    ),
}
"""Why the driver moves the memory of a program that asks for Kiwi's library, and what to do."""


BEFORE_THE_PROOF: Final = (
    "The driver moves its memory, because it began before this machine had proven itself for "
    "Kiwi's library. Start it again to have its memory moved at full speed."
)


def moved_by_driver(objection: OwnershipObjection | None, default: GateOnly | None) -> str:
    """Return why the driver moves memory that a library could move, and what to do; "": it does
    not, or as on the whole machine (``default``)."""
    if objection is not None and objection.why in _UNPROVEN and default is None:
        return BEFORE_THE_PROOF
    if objection is None or objection.why not in _GATE_ONLY:
        return ""
    why, remedy = _GATE_ONLY[objection.why]
    reason = f"{why} ({objection.detail})" if objection.detail else why
    return f"The driver moves its memory, not Kiwi's library: {reason}. {remedy}"


_UNPROVEN: Final = frozenset({GateOnly.UNPROVEN, GateOnly.PROOF_FAILED})


def pager_of_the_machine(why_not: GateOnly | None, proof: Proof | None, trouble: str = "") -> str:
    """Return what moves the memory of programs that ask for nothing, and why. ``trouble``: why the
    last proof showed nothing."""
    if why_not is None and proof is not None:
        out, back = (
            f"{speed / 1e9:.1f}" for speed in (proof.out_bytes_per_s, proof.in_bytes_per_s)
        )
        return f"by each program's own library, {out} GB/s out and {back} GB/s in (measured here)"
    if why_not is GateOnly.PROOF_FAILED and proof is not None:
        return (
            "by the driver's checkpoint, because this machine failed the proof for Kiwi's library: "
            f"{proof.failed} Please report that; `kiwi doctor --prove`, as the daemon's user, "
            "tries again"
        )
    if why_not is GateOnly.UNPROVEN and trouble:
        return (
            "by the driver's checkpoint, because this machine could not prove itself for Kiwi's "
            f"faster library: {trouble}"
        )
    if why_not is GateOnly.UNPROVEN:
        return (
            "by the driver's checkpoint, until this machine has proven itself for Kiwi's faster "
            "library. It does so when the GPU is idle; `kiwi doctor --prove`, as the daemon's "
            "user, does it now"
        )
    if why_not is GateOnly.COHERENT:
        return "by the driver's checkpoint, because on this machine the CPU uses GPU memory itself"
    return "by the driver's checkpoint, as the daemon was told (--pager checkpoint)"


def left_out(why: str) -> tuple[str, str]:
    """Return the notice for a session whose memory a leaving daemon could not page in."""
    text = (
        f"{DAEMON_ENDED} in system RAM, since it could not be brought back ({why}). Nothing is "
        "lost, but its calls to the GPU wait."
    )
    remedy = (
        "It goes on by itself when a daemon runs again (`kiwi daemon`, or ask who administers this "
        "machine), and, where its own library has moved the memory, once the GPU has room."
    )
    return text, remedy


def reason(why: Reason, detail: str = "") -> str:
    """Return why an operation was refused, as half a sentence."""
    return f"{_REASONS[why]}: {detail}" if detail else _REASONS[why]


def part_of_a_notebook(name: str) -> str:
    """Return what to do where a program that a notebook has started finds no room beside it."""
    return (
        f"this program was started by {name} and counts as part of it, so both must fit into the "
        "GPU together. Start it with `kiwi run -- COMMAND`: then it takes turns of its own."
    )
