"""Break Kiwi in many places that matter, and check that ``make test`` notices each.

``python tools/mutations.py`` applies one change at a time to a copy of the checkout and runs tests
there, without those that only ``make test-all`` runs. It prints the test that failed, and fails if
no test noticed a change. ``python tools/mutations.py 3 7`` applies only these.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    *("kiwi_core", "kiwi_jupyter", "native", "emulator", "integrations", "tests", "docs"),
    *("packaging", "benchmarks", "tools", "examples"),
)
QUICK = "not gpu and not slow and not wheels and not thorough"
LIMIT_S = 600


@dataclass(frozen=True)
class Mutation:
    """Replace ``old``, which ``file`` has once, by ``new``: the ``tests`` must fail."""

    file: str
    old: str
    new: str
    tests: str


SCHED = "tests/sched"
PAGER = "tests/pager"
PLAN = "tests/pager/test_plan.py tests/pager/test_linked_operation.py"
USERS = (
    "tests/daemon/test_other_users.py tests/daemon/test_link_owner.py tests/daemon/test_usage.py"
)

VMM = "native/tests/owner/test_vmm.py"
PAGES = "native/tests/owner/test_host_pages.py"

MUTATIONS = (
    # Room and turns
    Mutation(
        "kiwi_core/sched/rules/room.py",
        "    if short_bytes <= 0:\n        return RoomState.READY, None",
        "    if short_bytes <= st.total_bytes:\n        return RoomState.READY, None",
        SCHED,
    ),
    Mutation(
        "kiwi_core/sched/rules/room.py",
        "if victim.resident_bytes > left_bytes:",
        "if victim.resident_bytes < 0:",
        SCHED,
    ),
    Mutation("kiwi_core/sched/rules/room.py", "if must_stay(victim):", "if False:", SCHED),
    Mutation(
        "kiwi_core/sched/rules/room.py",
        "if victim is beside or victim.op is not None:",
        "if victim is beside:",
        SCHED,
    ),
    Mutation(
        "kiwi_core/sched/rules/room.py",
        "wanted = expected + st.margin_bytes + session.extra_room_bytes",
        "wanted = expected + session.extra_room_bytes",
        SCHED,
    ),
    Mutation(
        "kiwi_core/sched/rules/unguarded_and_stopped.py",
        "return session.mid_burst or session.at_work or bool(session.stopped)",
        "return session.mid_burst or session.at_work",
        SCHED,
    ),
    Mutation(
        "kiwi_core/sched/rules/turns.py",
        "else QueueStep.WAIT\n    if waiter.stopped:",
        "else QueueStep.WAIT\n    if False:",
        SCHED,
    ),
    Mutation(
        "kiwi_core/sched/rules/turns.py",
        "early = st.now_ns < runner.granted_ns + st.quantum_ns(runner)",
        "early = st.now_ns <= runner.granted_ns",
        SCHED,
    ),
    Mutation(
        "kiwi_core/sched/rules/bursts.py",
        "    session.contents_lost()\n",
        "",
        SCHED,
    ),
    Mutation(
        "kiwi_core/sched/model/turn.py",
        "        self.want = Want.NONE\n",
        "",
        SCHED,
    ),
    # The wire
    Mutation(
        "kiwi_core/wire/framing.py",
        "_decode(_client_decoder, CLIENT_TYPES, line, _REQUEST_MAX_BYTES)",
        "_decode(_client_decoder, CLIENT_TYPES, line, _FRAME_MAX_BYTES)",
        "tests/wire",
    ),
    # What a plan says
    Mutation(
        "kiwi_core/pager/plan.py",
        'return shut + [PlanStep("lock", one) for one in _of_driver(look) if _runs(one)]',
        "return shut",
        PLAN,
    ),
    Mutation(
        "kiwi_core/pager/plan.py",
        "one.backend is MovedBy.CHECKPOINT and not (one.empty or one.error)\n",
        "one.backend is MovedBy.CHECKPOINT and not one.error\n",
        PLAN,
    ),
    Mutation(
        "kiwi_core/pager/plan.py",
        "those = [one for one in driver_part(look) if not _by_library(one, Residency.RESIDENT)]",
        "those = driver_part(look)",
        PLAN,
    ),
    Mutation(
        "kiwi_core/pager/plan.py",
        "return has_in or process.reported is not Residency.PAGED_OUT",
        "return process.reported is not Residency.PAGED_OUT",
        PLAN,
    ),
    Mutation(
        "kiwi_core/pager/plan.py",
        "    held = (CheckpointState.CHECKPOINTED, CheckpointState.LOCKED)\n",
        "    held = (CheckpointState.CHECKPOINTED,)\n",
        PLAN,
    ),
    Mutation(
        "kiwi_core/pager/plan.py",
        "return bool(libraries) and all(map(all_out, libraries))",
        "return bool(libraries)",
        PLAN,
    ),
    Mutation(
        "kiwi_core/pager/plan.py",
        "if not need_bytes or available_bytes >= need_bytes:",
        "if True:",
        PLAN,
    ),
    Mutation(
        "kiwi_core/pager/look.py",
        "        return self.state not in FREE\n",
        "        return False\n",
        PLAN,
    ),
    Mutation(
        "kiwi_core/pager/unmovable.py",
        "_uvm_mappings(ref.pid, root) > _UVM_MAPPINGS",
        "False",
        PAGER,
    ),
    # What an operation sees, does, and undoes
    Mutation(
        "kiwi_core/pager/operation.py",
        "            await self._check(plan.driver_part(look), look)\n",
        "            pass\n",
        PAGER,
    ),
    Mutation(
        "kiwi_core/pager/operation.py",
        "        if plan.driver_in(look) or plan.libraries_in(look.freed()):",
        "        if False:",
        PAGER,
    ),
    Mutation(
        "kiwi_core/pager/operation.py",
        "            look = await self._stop_all(await self._look())\n",
        "            look = await self._look()\n",
        PAGER,
    ),
    Mutation(
        "kiwi_core/pager/operation.py",
        "        plan.check_lost(look)\n        self._performer",
        "        self._performer",
        PAGER,
    ),
    Mutation(
        "kiwi_core/pager/operation.py",
        "        plan.check_lost(look)\n        self._performer.still_wanted()\n",
        "        plan.check_lost(look)\n",
        PAGER,
    ),
    Mutation(
        "kiwi_core/pager/operation.py",
        "if round_ + 1 == _ROUNDS or not plan.driver_in(look):",
        "if True:",
        PAGER,
    ),
    Mutation(
        "kiwi_core/pager/survey.py",
        "        except Hung:\n            if not pids:\n                raise\n",
        "        except Hung:\n            raise\n",
        PAGER,
    ),
    Mutation(
        "kiwi_core/pager/survey.py",
        "        if late := [ref for ref in self.refs(target) if ref not in refs]:",
        "        if late := []:",
        PAGER,
    ),
    Mutation(
        "kiwi_core/pager/driver_steps.py",
        "        self._parts.survey.will_hold(ref)\n",
        "",
        PAGER,
    ),
    Mutation(
        "kiwi_core/pager/perform.py",
        "        parts.store_footprints()\n",
        "",
        PAGER,
    ),
    Mutation(
        "kiwi_core/pager/perform.py",
        '            if isinstance(outcome, Moved) or step.verb == "page-out":',
        "            if isinstance(outcome, Moved):",
        PAGER,
    ),
    Mutation(
        "kiwi_core/pager/undo.py",
        "                await self.restore(steps, reservation)\n        except",
        "                pass\n        except",
        PAGER,
    ),
    Mutation(
        "kiwi_core/pager/undo.py",
        '            await self._try(steps, "stays suspended", ending)\n',
        "            pass\n",
        PAGER,
    ),
    Mutation(
        "kiwi_core/pager/undo.py",
        "            if not ending.keep_locked:\n                errors",
        "            if True:\n                errors",
        PAGER,
    ),
    Mutation(
        "kiwi_core/pager/undo.py",
        "            await self._lock_again(those, ending)\n",
        "            pass\n",
        PAGER,
    ),
    Mutation(
        "kiwi_core/pager/undo.py",
        "        elif not (ending.keep_locked or self._given_up):",
        "        elif not ending.keep_locked:",
        PAGER,
    ),
    Mutation(
        "kiwi_core/pager/undo.py",
        "            shut = [step for step in back if "
        "found.get(step.process.ref) is Residency.SUSPENDED]",
        "            shut = []",
        PAGER,
    ),
    Mutation(
        "kiwi_core/pager/perform.py",
        "            reservation.spare_bytes, reservation.restores = spare_bytes, len(left)",
        "            reservation.spare_bytes = spare_bytes",
        PAGER,
    ),
    Mutation(
        "kiwi_core/pager/room.py",
        "        if free_bytes >= reservation.need_bytes + margin_bytes:\n",
        "        if True:\n",
        PAGER,
    ),
    Mutation(
        "kiwi_core/pager/room.py",
        "        least_bytes = restores * config.restore_margin_min_bytes\n",
        "        least_bytes = config.restore_margin_min_bytes\n",
        PAGER,
    ),
    Mutation(
        "kiwi_core/pager/session_pager.py",
        "            if isinstance(refused, Refused):\n                return refused\n",
        "",
        "tests/pager tests/daemon/test_library_ram.py tests/daemon/test_life.py",
    ),
    # Who may do what
    Mutation(
        "kiwi_core/daemon/base/peers.py",
        "return _is(peer, owner) or (peer.uid == 0 and self.knows_uid_of(peer))",
        "return True",
        USERS,
    ),
    Mutation(
        "kiwi_core/daemon/base/peers.py",
        "return _is(peer, owner) or self.is_admin(peer)",
        "return True",
        USERS,
    ),
    Mutation(
        "kiwi_core/daemon/base/peers.py",
        "if peer.uid in (self.daemon_uid, 0):",
        "if True:",
        USERS,
    ),
    Mutation(
        "kiwi_core/daemon/base/peers.py",
        "if not processes.runs_as(ref.pid, peer.uid):",
        "if False:",
        USERS,
    ),
    Mutation(
        "kiwi_core/daemon/sessions/requests.py",
        "if kept_out == ADMIN and not self._rights.is_admin(connection.peer):",
        "if False:",
        "tests/blackbox/test_admins.py",
    ),
    Mutation(
        "kiwi_core/client/directory.py",
        "return uid in (0, os.getuid())",
        "return True",
        "tests/client",
    ),
    Mutation(
        "kiwi_core/client/directory.py",
        "    if found.st_mode & _WRITABLE:",
        "    if False:",
        "tests/client",
    ),
    # System RAM
    Mutation(
        "kiwi_core/daemon/links/host_budget.py",
        "return max(0, reported_bytes - untrue_bytes)",
        "return reported_bytes",
        "tests/daemon/test_host_budget.py",
    ),
    # The gate and the moves of the library
    Mutation(
        "native/src/gate/gate.c",
        "        if (!wait_until(nobody_inside, until_ns)) break;\n",
        "",
        "native/tests/link/test_shut.py native/tests/interposer",
    ),
    Mutation(
        "native/src/gate/gate.c",
        "    bool good = wait_until(nobody_at_all, until_ns);",
        "    bool good = true;",
        "native/tests/link/test_shut.py native/tests/interposer",
    ),
    Mutation(
        "native/src/gate/gate.c",
        "        if ((state & (ARMED | SHUT)) && !__atomic_exchange_n",
        "        if ((state & ARMED) && !__atomic_exchange_n",
        "native/tests/link/test_shut.py native/tests/interposer",
    ),
    Mutation(
        "native/src/link/link.c",
        "    bool aside = kp_gate_stand_aside();",
        "    bool aside = false;",
        "native/tests/link",
    ),
    Mutation(
        "native/src/owner/own.c",
        "    struct kp_block *b = kp_ctx_block_at(p);",
        "    struct kp_block *b = kp_table_at(p);",
        "native/tests/owner",
    ),
    # What the program maps itself
    Mutation(
        "native/src/owner/vmm_move.c",
        "if (m->there && !m->reachable && m->access_count)",
        "if (false)",
        VMM,
    ),
    Mutation(
        "native/src/owner/vmm_move.c",
        "if (c->where == KP_IN && map_all(o) != CUDA_SUCCESS) kp_bytes_moved(c, KP_ARRIVING);",
        "(void)c;",
        VMM,
    ),
    Mutation(
        "native/src/owner/vmm_move.c",
        "while (m && (!m->reachable || m->offset || m->bytes != o->block->bytes || !may_write(m)))",
        "while (false)",
        VMM,
    ),
    Mutation("native/src/owner/stay.c", "    b->stays = true;\n", "", VMM),
    Mutation(
        "native/src/owner/handles.c",
        "if (o->references || o->mappings) return false;",
        "if (o->references) return false;",
        VMM,
    ),
    Mutation(
        "native/src/owner/vmm.c",
        "if (kp_own_has((CUdeviceptr)(uintptr_t)address)) return CUDA_ERROR_INVALID_VALUE;",
        "",
        VMM,
    ),
    Mutation(
        "native/src/owner/vmm.c",
        "    if (any_out(at, bytes)) {\n",
        "    if (false) {\n",
        VMM,
    ),
    Mutation(
        "native/src/owner/move_out.c",
        "if (healthy && p->mover) p->mover = healthy;",
        "",
        VMM,
    ),
    Mutation(
        "native/src/owner/pass.c",
        "    p->stranded = !p->mover;\n",
        "",
        VMM,
    ),
    # Pages of new host memory
    Mutation(
        "native/src/owner/pages.c",
        "    if (errno != EINVAL && errno != ENOSYS && errno != EPERM) return false;",
        "",
        PAGES,
    ),
    Mutation(
        "native/src/owner/pages.c",
        "    while (!failed && there() < at + bytes) {",
        "    while (false) {",
        PAGES,
    ),
    Mutation(
        "native/src/owner/arena.c",
        ".ahead = (size_t)(used < all ? used : all);",
        ".ahead = (size_t)all;",
        PAGES,
    ),
    # The pool of movers
    Mutation(
        "kiwi_core/movers/pool.py",
        "self._give_back(mover) if answered else self._kill(mover)",
        "self._give_back(mover)",
        "tests/movers",
    ),
    # The notebook
    Mutation(
        "kiwi_jupyter/kernel/burst.py",
        "(not client.connected or self._put_off())",
        "not client.connected",
        "tests/kernel/test_turns.py",
    ),
    Mutation(
        "kiwi_jupyter/server_ext/handlers.py",
        "if not any(one.id == session and one.mine for",
        "if not any(one.id == session for",
        "tests/server_ext/test_actions.py tests/server_ext/test_rights.py",
    ),
)


def copy(into: Path) -> None:
    for name in COPIED:
        if (ROOT / name).exists():
            leave_out = shutil.ignore_patterns("__pycache__", "node_modules", ".hypothesis")
            shutil.copytree(ROOT / name, into / name, ignore=leave_out, symlinks=True)
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy2(file, into)


def caught_by(mutation: Mutation, checkout: Path) -> str:
    """Return the test that fails with ``mutation``; "" if all pass."""
    file = checkout / mutation.file
    whole = file.read_text()
    if whole.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.file} has {whole.count(mutation.old)} times: {mutation.old}")
    file.write_text(whole.replace(mutation.old, mutation.new))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "-m", QUICK,
             "-p", "no:cacheprovider", *mutation.tests.split()],
            cwd=checkout, env={**os.environ, "PYTHONPATH": str(checkout)},
            capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"(not within {LIMIT_S} s)"
    finally:
        file.write_text(whole)
    if done.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"(pytest ended with {done.returncode})"


def main() -> int:
    chosen = [int(word) for word in sys.argv[1:]] or list(range(len(MUTATIONS)))
    unnoticed = []
    with tempfile.TemporaryDirectory(prefix="kiwi-mutations-") as directory:
        checkout = Path(directory)
        copy(checkout)
        for number in chosen:
            mutation = MUTATIONS[number]
            began_s = time.monotonic()
            test = caught_by(mutation, checkout)
            took_s = time.monotonic() - began_s
            change = " ".join(mutation.old.split())[:60]
            print(f"{number:2} {took_s:4.0f} s  {mutation.file}: {change}", flush=True)
            print(f"           {test or 'UNNOTICED'}", flush=True)
            if not test:
                unnoticed.append(number)
    print(f"{len(chosen) - len(unnoticed)} of {len(chosen)} noticed; unnoticed: {unnoticed}")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
