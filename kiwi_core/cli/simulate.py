"""``kiwi simulate``: show what another policy or setting would do with the same work."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kiwi_core.cli import exits, journals
from kiwi_core.cli.common import for_others_to_read, not_written
from kiwi_core.cli.numbers import number, whole
from kiwi_core.cli.simulate_text import Column, column_name, report_json, table_lines
from kiwi_core.cli.terminal import Style
from kiwi_core.cli.usage import parse_since
from kiwi_core.config import DEFAULTS
from kiwi_core.errors import CallerError
from kiwi_core.simulate import policies
from kiwi_core.simulate.fleet import Plan, Work
from kiwi_core.simulate.fleet import run as run_fleet
from kiwi_core.simulate.measure import Measures, summarise
from kiwi_core.simulate.mixes import MIXES
from kiwi_core.simulate.model import GB, Cluster, FaultRates, Placing, Setup, SimulatedMachine
from kiwi_core.simulate.picture import waits_svg
from kiwi_core.simulate.recorded import read
from kiwi_core.simulate.trace import Trace, from_lines, to_lines
from kiwi_core.states import AntiThrash
from kiwi_core.units import GIB, TIB, ns_to_seconds, parse_size_bytes, seconds_to_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

DESCRIPTION = """\
Runs the daemon's own scheduler on a virtual clock over a trace of work, and says how long cells
would have waited: by their length, per policy and time quantum, side by side. The work is a mix
that is generated (the same again from the same seed), a trace file, or a daemon's journal: what
would the other policy have done here last week?"""
EPILOG = f"""\
mixes:
{chr(10).join(f"  {name:13} {mix.summary}" for name, mix in MIXES.items())}

A day of eight sessions takes seconds; 1,000 GPUs of ten notebooks minutes. With --nodes, sessions
of the mix come and go, and --place says who chooses their node and GPU.

examples:
  kiwi simulate --mix 6+1 --tq 10 30 60
  kiwi simulate --journal GPU-0d1e.journal --since 7d --policy round-robin interactive
  kiwi simulate --mix notebooks --gpus 100 --jobs 2 --json results.json
  kiwi simulate --anonymise GPU-0d1e.journal -o trace.json     to send to somebody
  kiwi simulate --trace trace.json --policy round-robin
  kiwi simulate --nodes 125 --gpus 8 --sessions 10 --place pack spread wait
"""

DEFAULT_MIX = "notebooks"
DEFAULT_OUT_GBPS, DEFAULT_IN_GBPS = 2.3, 6.0
CHECKPOINT_LATENCY_S = 0.2
"""The driver's checkpoint on an H200 with driver 580.159: moves of 0.5 to 10 GB took 0.1 s and
0.43 s per GB out, 0.35 s and 0.17 s per GB in."""
DEFAULT_LATENCY_S = 0.1
GPUS_MAX = 100_000
HOURS_MAX = 24.0 * 366
LONG_HOURS = 24.0 * 20
"""Simulated hours, over all GPUs and columns, from which on the progress is always shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group("the work").add_mutually_exclusive_group()
    work.add_argument(
        "--mix", choices=list(MIXES), metavar="NAME",
        help=f"generate it: {', '.join(MIXES)} (default: {DEFAULT_MIX})",
    )  # fmt: skip
    work.add_argument("--trace", metavar="FILE", help="a trace file, or - for standard input")
    work.add_argument(
        "--journal", metavar="FILE",
        help="a daemon's journal, or -; its own waits are shown, too",
    )  # fmt: skip
    work.add_argument(
        "--anonymise", metavar="JOURNAL",
        help="only turn a journal into a trace file, without ids and times of day (see -o)",
    )  # fmt: skip
    parser.add_argument(
        "--since", type=parse_since, default=0.0, metavar="WHEN",
        help="of a journal: only cells that were asked for since then: 30m, 12h, 7d ago, or a "
        "time like 2026-11-14 or 2026-11-14T09:00",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", metavar="FILE",
        help="write the work there as a trace, and simulate nothing (- is standard output)",
    )  # fmt: skip
    parser.add_argument(
        "--hours", type=number(0.01, HOURS_MAX), default=24.0, metavar="H",
        help="of a mix: how long its sessions live if they never wait (default: 24)",
    )  # fmt: skip
    parser.add_argument(
        "--sessions", type=whole(1, 3000), metavar="N", help="of a mix: number of sessions in all"
    )
    parser.add_argument("--seed", type=whole(0, 2**32), default=0, metavar="N", help="(default: 0)")
    parser.add_argument(
        "--policy", nargs="+", choices=policies.NAMES, metavar="NAME",
        help=f"one or more of: {', '.join(policies.NAMES)} (default: of a journal the one that was "
        f"in force, and then all others; else {policies.NAMES[0]})",
    )  # fmt: skip
    parser.add_argument(
        "--tq", nargs="+", type=number(0.1, 86400.0), metavar="S",
        help="time quanta, seconds, each with each policy (default: the journal's, else 30)",
    )  # fmt: skip
    parser.add_argument(
        "--anti-thrash", choices=[mode.value for mode in AntiThrash],
        help="when sessions are run one at a time (default: the journal's, else on)",
    )  # fmt: skip
    _add_machine(parser)
    _add_cluster(parser)
    parser.add_argument(
        "--gpus", type=whole(1, GPUS_MAX), default=1, metavar="N",
        help="number of GPUs, each with another seed, added up; with --nodes, on each node "
        "(default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=whole(1, 1024), default=len(os.sched_getaffinity(0)), metavar="N",
        help="processes (default: the cores that there are)",
    )  # fmt: skip
    parser.add_argument("--users", action="store_true", help="also a line for each user")
    parser.add_argument("--json", metavar="FILE", help="write everything there (- prints it)")
    parser.add_argument("--svg", metavar="FILE", help="draw waits by length of cell there")


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gbps", type=_speeds, metavar="X",
        help="speed of moves, GB/s; OUT,IN where they differ (default: as the journal has "
        f"measured, else {DEFAULT_OUT_GBPS:g},{DEFAULT_IN_GBPS:g})",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=_size, metavar="SIZE", help="of a mix: the GPU's (default: 80 GiB)"
    )
    parser.add_argument(
        "--host-memory", type=_size, metavar="SIZE",
        help="system RAM for memory that is paged out (default: the journal's, else 2 TiB)",
    )  # fmt: skip
    parser.add_argument(
        "--swap-latency", type=number(0.0, 60.0), metavar="S",
        help="what each move costs beside its bytes (default: 0.2; with --gbps, 0.1; with the "
        "speeds of a journal, which have that in them, 0)",
    )  # fmt: skip
    parser.add_argument(
        "--noise", type=number(0.0, 0.9), default=0.2, metavar="SHARE",
        help="each move's speed is drawn from 1 ± this (default: 0.2)",
    )  # fmt: skip
    parser.add_argument(
        "--contention", type=number(0.0, 1.0), default=1.0, metavar="SHARE",
        help="how much runners side by side slow each other down (default: 1, they share the "
        "GPU's time)",
    )  # fmt: skip
    for name, what in (
        ("refuse", "that the driver refuses an operation"),
        ("hang", "that a driver call hangs until after its deadline"),
        ("kill", "that a kernel dies in the middle of a cell"),
    ):
        parser.add_argument(
            f"--{name}", type=number(0.0, 0.5), default=0.0, metavar="CHANCE",
            help=f"chance {what} (default: 0)",
        )  # fmt: skip


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a cluster")
    group.add_argument(
        "--nodes", type=whole(1, GPUS_MAX), metavar="N",
        help="of a mix: number of nodes, on which sessions come and go",
    )  # fmt: skip
    group.add_argument(
        "--place", nargs="+", choices=[rule.value for rule in Placing], metavar="RULE",
        default=[Placing.WAIT.value],
        help="how a node is chosen: pack (the first one with a place), spread (the one with the "
        "fewest sessions), wait (the shortest wait by its weight); several are compared "
        "(default: wait)",
    )  # fmt: skip
    group.add_argument(
        "--places", type=whole(1, 1000), default=Cluster.places, metavar="N",
        help=f"the most sessions on a GPU (default: {Cluster.places})",
    )  # fmt: skip
    group.add_argument(
        "--stay", type=number(0.01, HOURS_MAX), default=Cluster.stay_hours, metavar="H",
        help="how long a session stays if it never waits; so many come within --hours that each "
        f"GPU has those of the mix on average (default: {Cluster.stay_hours:g})",
    )  # fmt: skip
    group.add_argument(
        "--weight-delay", type=number(0.1, 86400.0), metavar="S",
        default=ns_to_seconds(Cluster.weight_delay_ns),
        help="how often the engine reads the nodes' waits, seconds (default: "
        f"{ns_to_seconds(Cluster.weight_delay_ns):g})",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    cluster = _cluster(args)
    work, real = _work(args)
    if args.output or args.anonymise:
        trace = b"".join(to_lines(work.of(args.seed, _machine(args, work))))
        if args.output in (None, "-"):
            sys.stdout.buffer.write(trace)
        else:
            _write(args.output, trace)
        return exits.OK
    plans = _plans(args, work, cluster)
    hours = sum(
        (plan.cluster.gpus_in_all if plan.cluster else plan.gpus)
        * (plan.work.hours if plan.work.mix else 24.0)
        for plan in plans
    )
    report = _Progress() if sys.stderr.isatty() or hours > LONG_HOURS else None
    measured = run_fleet(plans, jobs=args.jobs, progress=report)
    columns: list[Column] = [(None, summarise(real))] if real is not None else []
    columns += [
        (plan.setup, summarise(measures)) for plan, measures in zip(plans, measured, strict=True)
    ]
    title = _title(plans[0])
    if args.json:
        data = report_json(plans[0], columns)
        if args.json == "-":
            print(data.decode())
        else:
            _write(args.json, data + b"\n")
    if args.svg:
        named = [
            (column_name(setup, cluster=cluster is not None), summary) for setup, summary in columns
        ]
        _write(args.svg, waits_svg(title, named).encode())
    if args.json != "-":
        style = Style.of(sys.stdout)
        lines = table_lines(title, columns, style, users=args.users, cluster=cluster is not None)
        print("\n".join(lines))
    return exits.OK


# --- the work -----------------------------------------------------------------------------------


def _work(args: argparse.Namespace) -> tuple[Work, Measures | None]:
    """Return the work and, if it is from a journal, its real results."""
    if name := args.journal or args.anonymise:
        with journals.opened(name) as file:
            records = journals.records(file)
            trace, real = read(records, contention=args.contention, since_unix_s=args.since)
        return Work(trace=trace), real
    if args.since:
        raise CallerError(
            "bad-option",
            "--since is for journals: nothing else knows when it was.",
            "Leave it out, or give --journal.",
        )
    if args.trace:
        return Work(trace=_read_trace(args.trace)), None
    return Work(mix=args.mix or DEFAULT_MIX, hours=args.hours, sessions=args.sessions), None


def _read_trace(name: str) -> Trace:
    if name == "-":
        return from_lines(sys.stdin.buffer)
    try:
        with Path(name).open("rb") as file:
            return from_lines(file)
    except OSError as error:
        raise CallerError(
            "no-trace",
            f"{name} cannot be read: {error.strerror}.",
            "Make one with kiwi simulate --anonymise JOURNAL -o FILE, or use --mix.",
        ) from error


def _machine(args: argparse.Namespace, work: Work) -> SimulatedMachine:
    trace = work.trace
    recorded = trace.recorded if trace is not None else None
    # The journal's speeds. If it has measured one way only, that counts for both.
    out_gbps = recorded and (recorded.out_gbps or recorded.in_gbps)
    in_gbps = recorded and (recorded.in_gbps or recorded.out_gbps)
    latency_s = CHECKPOINT_LATENCY_S if out_gbps is None else 0.0
    if args.gbps:
        (out_gbps, in_gbps), latency_s = args.gbps, DEFAULT_LATENCY_S
    if args.swap_latency is not None:
        latency_s = args.swap_latency
    return SimulatedMachine(
        total_bytes=trace.total_bytes if trace is not None else args.memory or 80 * GIB,
        host_budget_bytes=args.host_memory
        or (recorded.host_budget_bytes if recorded is not None else 2 * TIB),
        out_bytes_per_s=(out_gbps or DEFAULT_OUT_GBPS) * GB,
        in_bytes_per_s=(in_gbps or DEFAULT_IN_GBPS) * GB,
        swap_fixed_ns=seconds_to_ns(latency_s),
        noise=args.noise,
        contention=args.contention,
    )


def _plans(args: argparse.Namespace, work: Work, cluster: Cluster | None) -> list[Plan]:
    machine = _machine(args, work)
    recorded = work.trace.recorded if work.trace is not None else None
    quanta_s = args.tq or [recorded.tq_s if recorded is not None else ns_to_seconds(DEFAULTS.tq_ns)]
    mode = args.anti_thrash or (recorded.anti_thrash if recorded is not None else "on")
    named: Sequence[str] = args.policy or policies.NAMES[:1]
    if not args.policy and recorded is not None and recorded.policy in policies.NAMES:
        named = (recorded.policy, *policies.NAMES)  # the others are compared with it
    return [
        Plan(
            work=work,
            machine=machine,
            setup=Setup(
                policy=policy,
                tq_ns=seconds_to_ns(tq_s),
                anti_thrash=AntiThrash(mode),
                placing=Placing(rule),
            ),
            faults=FaultRates(refuse=args.refuse, hang=args.hang, kill=args.kill),
            seed=args.seed,
            gpus=args.gpus,
            cluster=cluster,
        )
        for policy in dict.fromkeys(named)
        for tq_s in dict.fromkeys(quanta_s)
        for rule in dict.fromkeys(args.place if cluster else args.place[:1])
    ]


def _cluster(args: argparse.Namespace) -> Cluster | None:
    if args.nodes is None:
        return None
    if args.trace or args.journal or args.anonymise:
        raise CallerError(
            "bad-option",
            "--nodes needs a mix: a trace says which GPU its sessions were on.",
            "Leave out --nodes, or give --mix in place of the trace.",
        )
    return Cluster(
        nodes=args.nodes,
        gpus=args.gpus,
        places=args.places,
        stay_hours=args.stay,
        weight_delay_ns=seconds_to_ns(args.weight_delay),
    )


# --- output -------------------------------------------------------------------------------------


class _Progress:
    """The progress: one line on a terminal, elsewhere a line for each tenth."""

    def __init__(self) -> None:
        self._rewrites = sys.stderr.isatty()
        self._shown_step = -1

    def __call__(self, share: float) -> None:
        step = int(share * (100 if self._rewrites else 10))
        if step == self._shown_step:
            return
        self._shown_step = step
        text = f"simulated: {share:4.0%}"
        if self._rewrites:
            print(f"\r{text}", end="\n" if share >= 1.0 else "", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


def _title(plan: Plan) -> str:
    work, machine = plan.work, plan.machine
    name = MIXES[work.mix].summary if work.mix else (work.trace.name if work.trace else "")
    speeds = f"{machine.out_bytes_per_s / GB:g}"
    if machine.in_bytes_per_s != machine.out_bytes_per_s:
        speeds += f" out, {machine.in_bytes_per_s / GB:g} in"
    several = f"{plan.gpus:,} GPUs, each: " if plan.gpus > 1 else ""
    if plan.cluster is not None:
        several = f"{plan.cluster.nodes:,} nodes × {plan.cluster.gpus:,} GPUs, each: "
    return f"{several}{name}, {speeds} GB/s"


def _write(name: str, data: bytes) -> None:
    try:
        with open(name, "wb", opener=for_others_to_read) as file:
            file.write(data)
    except OSError as error:
        raise not_written(name, error) from error


# --- arguments ----------------------------------------------------------------------------------


def _speeds(text: str) -> tuple[float, float]:
    one = number(0.01, 10_000.0)
    out, comma, back = text.partition(",")
    return one(out), one(back) if comma else one(out)


def _size(text: str) -> int:
    try:
        size_bytes = parse_size_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size_bytes < GIB:
        raise argparse.ArgumentTypeError(f"{text!r} is less than 1 GiB")
    return size_bytes
