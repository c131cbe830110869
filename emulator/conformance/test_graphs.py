"""Tests of stream capture and CUDA graphs: what is captured, replayed, and invalidated."""

from __future__ import annotations

import contextlib
from importlib import metadata

import pytest
from cuda_processes import WorkerGoneError
from cuda_setups import GRAPHS

MIB = 1 << 20
UNSUPPORTED = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
INVALIDATED = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
NONE, ACTIVE, SPOILED = 0, 1, 2


@pytest.fixture
def forbidden(shared_platform):
    """Return the result of an allocation that a capture forbids. Memory that Kiwi owns is allocated
    all the same: it comes from calls that captures allow."""
    return "CUDA_SUCCESS" if shared_platform.preloaded else UNSUPPORTED


SETUP = GRAPHS + "p = alloc(4 * MIB); q = alloc(4 * MIB)\n"


@pytest.fixture
def worker(shared_platform):
    """Return one process for all tests here; each test has its own streams, and the default
    mode."""
    worker = shared_platform.shared(SETUP)
    worker.do("fresh()")
    return worker


def test_captured_work_happens_at_each_launch(worker):
    worker.do("write(p, bytes(MIB)); write(q, bytes(MIB)); begin()")
    assert worker.get("[status(), status(b)]") == [ACTIVE, NONE]
    worker.do("put(p, 7, MIB); ck(driver.cuMemcpyDtoDAsync(q, p, MIB, s)); g = end()")
    assert worker.get("status()") == NONE
    assert worker.get("types(g)") == ["MEMSET", "MEMCPY"]
    assert worker.get("edges(g)") == [[0, 1]]
    assert worker.get("read(q, MIB) == bytes(MIB)"), "capturing does nothing"
    worker.do("e = instantiate(g); ck(driver.cuGraphDestroy(g))")
    for _ in range(3):
        worker.do("write(p, bytes(MIB)); write(q, bytes(MIB)); run(e)")
        assert worker.get("set(read(q, MIB)) == {7}")
    worker.do("ck(driver.cuGraphExecDestroy(e))")


def test_a_captured_copy_reads_the_host_when_it_is_launched(worker):
    worker.do(
        "h = int(ck(driver.cuMemHostAlloc(MIB, 0))); ctypes.memset(h, 1, MIB); begin()\n"
        "ck(driver.cuMemcpyHtoDAsync(p, h, MIB, s)); e = instantiate(end())"
    )
    for value in (2, 3):
        worker.do(f"ctypes.memset(h, {value}, MIB); run(e)")
        assert worker.get(f"set(read(p, MIB)) == {{{value}}}")
    worker.do("ck(driver.cuMemFreeHost(h))")


@contextlib.contextmanager
def naming_the_bindings():
    """Add the version of cuda-bindings to the error of a crashed program: some versions crash by
    themselves."""
    try:
        yield
    except WorkerGoneError as gone:
        raise AssertionError(f"{gone}. {crash_words(metadata.version('cuda-bindings'))}") from gone


def known_to_survive(version):
    return tuple(map(int, version.split(".")[:2])) >= (13, 5)


def crash_words(version):
    if known_to_survive(version):
        return f"It has cuda-bindings {version}, which is not known to crash here."
    return (
        f"It has cuda-bindings {version}. Versions before 13.5.0 crash at the second launch of a "
        "captured host function, whatever the driver: install 13.5.0 or newer."
    )


def test_a_crash_names_the_bindings():
    with pytest.raises(AssertionError, match=r"gone\. It has cuda-bindings"), naming_the_bindings():
        raise WorkerGoneError("worker 7 is gone")
    assert "13.4.4. Versions before 13.5.0 crash" in crash_words("13.4.4")
    assert "13.10.0, which is not known" in crash_words("13.10.0")


def test_host_functions_are_captured(shared_platform):
    """This runs in a program of its own: see ``crash_words``."""
    worker = shared_platform.worker()
    worker.do(
        SETUP + "calls = []; f = HOST_FUNCTION(lambda data: calls.append(data))\n"
        "fn = driver.CUhostFn(ctypes.cast(f, ctypes.c_void_p).value)\n"
        "begin(); ck(driver.cuLaunchHostFunc(s, fn, 5)); g = end(); e = instantiate(g)"
    )
    assert worker.get("calls") == []
    launches = 2 if known_to_survive(metadata.version("cuda-bindings")) else 1
    with naming_the_bindings():
        worker.do(f"for _ in range({launches}): run(e)")
        assert worker.get("calls") == [5] * launches
        assert worker.get("types(g)") == ["HOST"]


def test_events_fork_a_capture_and_join_it(worker):
    worker.do(
        "f, j = ck(driver.cuEventCreate(0)), ck(driver.cuEventCreate(0)); begin()\n"
        "put(p, 1, MIB); ck(driver.cuEventRecord(f, s)); ck(driver.cuStreamWaitEvent(b, f, 0))"
    )
    assert worker.get("status(b)") == ACTIVE
    worker.do(
        "ck(driver.cuMemcpyDtoDAsync(q, p, MIB, b)); put(p + MIB, 2, MIB)\n"
        "ck(driver.cuEventRecord(j, b)); ck(driver.cuStreamWaitEvent(s, j, 0))\n"
        "ck(driver.cuMemcpyDtoDAsync(q + MIB, p + MIB, MIB, s)); g = end()"
    )
    assert worker.get("status(b)") == NONE
    assert sorted(worker.get("types(g)")) == ["MEMCPY", "MEMCPY", "MEMSET", "MEMSET"]
    assert worker.get("edges(g)") == [[0, 1], [0, 2], [1, 3], [2, 3]]
    worker.do("write(q, bytes(2 * MIB)); run(instantiate(g))")
    assert worker.get("[read(q, 1)[0], read(q + MIB, 1)[0]]") == [1, 2]


def test_a_fork_that_is_not_joined(worker):
    worker.do(
        "f = ck(driver.cuEventCreate(0)); begin(); put(p, 1, MIB); ck(driver.cuEventRecord(f, s))\n"
        "ck(driver.cuStreamWaitEvent(b, f, 0)); put(q, 2, MIB, b)"
    )
    unjoined = "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"
    assert worker.get("name_of(driver.cuStreamEndCapture, s)") == unjoined
    assert worker.get("[status(), status(b)]") == [NONE, NONE]


def test_only_where_it_began_a_capture_ends(worker):
    worker.do(
        "f = ck(driver.cuEventCreate(0)); begin(); put(p, 1, MIB); ck(driver.cuEventRecord(f, s))\n"
        "ck(driver.cuStreamWaitEvent(b, f, 0))"
    )
    unmatched = "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"
    assert worker.get("name_of(driver.cuStreamEndCapture, b)") == unmatched
    worker.get("name_of(driver.cuStreamEndCapture, s)")
    assert worker.get("[status(), status(b)]") == [NONE, NONE]


@pytest.mark.parametrize(("mode", "may"), [("GLOBAL", False), ("LOCAL", False), ("RELAXED", True)])
def test_only_a_relaxed_capture_may_be_ended_by_another_thread(worker, mode, may):
    worker.do(f"begin(mode={mode}); put(p, 1, MIB)")
    said = worker.get("elsewhere(driver.cuStreamEndCapture, s)")
    assert said == ("CUDA_SUCCESS" if may else "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD")
    if not may:
        worker.get("name_of(driver.cuStreamEndCapture, s)")
    assert worker.get("status()") == NONE


@pytest.mark.parametrize(
    "call", ["driver.cuStreamSynchronize, s", "driver.cuStreamQuery, s", "driver.cuCtxSynchronize"]
)
@pytest.mark.parametrize("mode", ["GLOBAL", "RELAXED"])
def test_waiting_for_what_is_captured_spoils_it(worker, call, mode):
    worker.do(f"begin(mode={mode}); put(p, 1, MIB)")
    assert worker.get(f"name_of({call})") == UNSUPPORTED
    assert worker.get("status()") == SPOILED
    assert worker.get("name_of(driver.cuMemsetD8Async, p, 1, MIB, s)") == INVALIDATED
    assert worker.get("name_of(driver.cuStreamEndCapture, s)") == INVALIDATED
    worker.do("begin(); put(p, 9, MIB); run(instantiate(end()))")
    assert worker.get("read(p, 1)[0]") == 9


def test_a_captured_event_cannot_be_asked(worker):
    worker.do("f = ck(driver.cuEventCreate(0)); begin(mode=RELAXED); put(p, 1, MIB)")
    worker.do("ck(driver.cuEventRecord(f, s))")
    assert worker.get("name_of(driver.cuEventQuery, f)") == "CUDA_ERROR_CAPTURED_EVENT"
    worker.get("name_of(driver.cuStreamEndCapture, s)")
    worker.do("ck(driver.cuEventRecord(f, s)); ck(driver.cuEventSynchronize(f))")


def test_an_event_from_outside_cannot_be_waited_for(worker):
    worker.do("f = ck(driver.cuEventCreate(0)); put(p, 1, MIB, b); ck(driver.cuEventRecord(f, b))")
    worker.do("begin(); put(p, 1, MIB)")
    isolation = "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"
    assert worker.get("name_of(driver.cuStreamWaitEvent, s, f, 0)") == isolation
    assert worker.get("name_of(driver.cuStreamEndCapture, s)") == INVALIDATED


def test_two_captures_do_not_merge(worker):
    worker.do(
        "f = ck(driver.cuEventCreate(0)); begin(); begin(b); put(p, 1, MIB); put(q, 1, MIB, b)\n"
        "ck(driver.cuEventRecord(f, b))"
    )
    merge = "CUDA_ERROR_STREAM_CAPTURE_MERGE"
    assert worker.get("name_of(driver.cuStreamWaitEvent, s, f, 0)") == merge
    worker.get("[name_of(driver.cuStreamEndCapture, x) for x in (s, b)]")
    assert worker.get("[status(), status(b)]") == [NONE, NONE]


def test_the_legacy_stream_beside_a_blocking_stream_that_captures(worker):
    worker.do("blocking = ck(driver.cuStreamCreate(0)); begin(blocking); put(p, 1, MIB, blocking)")
    implicit = "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"
    assert worker.get("name_of(driver.cuStreamIsCapturing, 0)") == implicit
    assert worker.get("status(blocking)") == ACTIVE, "asking spoils nothing"
    assert worker.get("name_of(driver.cuMemsetD8Async, q, 1, MIB, 0)") == implicit
    assert worker.get("name_of(driver.cuStreamEndCapture, blocking)") == INVALIDATED


def test_wrong_beginnings_and_ends(worker):
    assert worker.get("name_of(driver.cuStreamBeginCapture, 0, GLOBAL)") == UNSUPPORTED
    assert worker.get("name_of(driver.cuStreamEndCapture, s)") == "CUDA_ERROR_ILLEGAL_STATE"
    worker.do("begin()")
    again = worker.get("name_of(driver.cuStreamBeginCapture, s, GLOBAL)")
    assert again == "CUDA_ERROR_ILLEGAL_STATE"
    assert worker.get("types(end())") == []


def test_the_mode_of_a_thread_is_exchanged(worker):
    worker.do("exchange = lambda m: int(ck(driver.cuThreadExchangeStreamCaptureMode(m)))")
    assert worker.get("[exchange(RELAXED), exchange(LOCAL), exchange(GLOBAL)]") == [0, 2, 1]


@pytest.mark.parametrize("mode", ["GLOBAL", "LOCAL"])
def test_allocating_spoils_a_capture(worker, mode, forbidden):
    worker.do(f"begin(mode={mode}); put(p, 1, MIB)")
    assert worker.get("name_of(driver.cuMemAlloc, MIB)") == forbidden
    assert worker.get("status()") == (SPOILED if forbidden == UNSUPPORTED else ACTIVE)
    worker.get("name_of(driver.cuStreamEndCapture, s)")
    assert worker.get("status()") == NONE


@pytest.mark.parametrize("mode", ["GLOBAL", "LOCAL"])
def test_pinning_spoils_a_capture(worker, mode):
    worker.do(f"begin(mode={mode}); put(p, 1, MIB)")
    assert worker.get("name_of(driver.cuMemHostAlloc, MIB, 0)") == UNSUPPORTED
    assert worker.get("name_of(driver.cuStreamEndCapture, s)") == INVALIDATED


@pytest.mark.parametrize("how", ["capture", "thread"])
def test_allocating_is_allowed_where_either_is_relaxed(worker, how):
    worker.do(
        "begin(mode=RELAXED)"
        if how == "capture"
        else "begin(); ck(driver.cuThreadExchangeStreamCaptureMode(RELAXED))"
    )
    worker.do("r = alloc(MIB); put(r, 3, MIB); run(instantiate(end()))")
    assert worker.get("set(read(r, MIB)) == {3}")


@pytest.mark.parametrize(("mode", "may"), [("GLOBAL", False), ("LOCAL", True), ("RELAXED", True)])
def test_allocating_beside_a_capture_of_another_thread(worker, mode, may, forbidden):
    worker.do(f"begin(mode={mode}); put(p, 1, MIB)")
    said = worker.get("elsewhere(driver.cuMemAlloc, MIB)")
    assert said == ("CUDA_SUCCESS" if may else forbidden)
    ended = worker.get("name_of(driver.cuStreamEndCapture, s)")
    assert ended == (INVALIDATED if said == UNSUPPORTED else "CUDA_SUCCESS")


def test_what_a_capture_says_of_itself(worker):
    worker.do("begin(); put(p, 1, MIB); info = ck(driver.cuStreamGetCaptureInfo(s))")
    assert worker.get("int(info[0])") == ACTIVE
    assert worker.get("int(info[1]) > 0 and info[-1]") == 1
    assert worker.get("types(info[2])") == ["MEMSET"]
    assert worker.get("[int(n) for n in info[3]] == [int(n) for n in nodes(info[2])]")
    worker.do("g = end()")
    assert worker.get("int(ck(driver.cuStreamGetCaptureInfo(s))[0])") == NONE


def test_a_graph_that_is_made_by_hand_keeps_its_order(worker):
    """The copy is added first: only the edges define the order."""
    worker.do(
        "g = ck(driver.cuGraphCreate(0)); c = ck(driver.cuCtxGetCurrent())\n"
        "copy = ck(driver.cuGraphAddMemcpyNode(g, None, 0, copy_params(q, p, MIB), c))\n"
        "joint = ck(driver.cuGraphAddEmptyNode(g, None, 0))\n"
        "fill = ck(driver.cuGraphAddMemsetNode(g, None, 0, memset_params(p, 6, MIB), c))\n"
        "ck(add_edges(g, [fill, joint], [joint, copy]))"
    )
    assert worker.get("types(g)") == ["MEMCPY", "EMPTY", "MEMSET"]
    assert worker.get("edges(g)") == [[1, 0], [2, 1]]
    worker.do("write(p, bytes(MIB)); write(q, bytes(MIB)); run(instantiate(g))")
    assert worker.get("set(read(q, MIB)) == {6}")
    worker.do("ck(add_edges(g, [copy], [fill]))")
    assert worker.get("name_of(driver.cuGraphInstantiate, g, 0)") == "CUDA_ERROR_INVALID_VALUE"


def test_a_graph_within_a_graph_is_a_copy(worker):
    worker.do(
        "inner = ck(driver.cuGraphCreate(0)); c = ck(driver.cuCtxGetCurrent())\n"
        "ck(driver.cuGraphAddMemsetNode(inner, None, 0, memset_params(p, 4, MIB), c))\n"
        "g = ck(driver.cuGraphCreate(0))\n"
        "child = ck(driver.cuGraphAddChildGraphNode(g, None, 0, inner))\n"
        "ck(driver.cuGraphAddMemcpyNode(g, [child], 1, copy_params(q, p, MIB), c))\n"
        "ck(driver.cuGraphDestroy(inner)); run(instantiate(g))"
    )
    assert worker.get("types(g)") == ["GRAPH", "MEMCPY"]
    assert worker.get("types(ck(driver.cuGraphChildGraphNodeGetGraph(child)))") == ["MEMSET"]
    assert worker.get("set(read(q, MIB)) == {4}")


def test_a_graph_cannot_be_launched_into_a_capture(worker):
    worker.do("begin(); put(p, 8, MIB); e = instantiate(end()); begin()")
    assert worker.get("name_of(driver.cuGraphLaunch, e, s)") == UNSUPPORTED
    assert worker.get("status()") == SPOILED
    assert worker.get("name_of(driver.cuStreamEndCapture, s)") == INVALIDATED


def test_an_executable_graph_is_updated(worker):
    worker.do("begin(); put(p, 1, MIB); e = instantiate(end()); begin(); put(p, 2, MIB); g = end()")
    worker.do("ck(driver.cuGraphExecUpdate(e, g)); run(e)")
    assert worker.get("read(p, 1)[0]") == 2
    worker.do("begin(); put(p, 3, MIB); put(q, 3, MIB); other = end()")
    failure = "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE"
    assert worker.get("name_of(driver.cuGraphExecUpdate, e, other)") == failure
    worker.do("write(p, bytes(MIB)); run(e)")
    assert worker.get("read(p, 1)[0]") == 2


def test_executable_graphs_survive_a_checkpoint(shared_platform, worker):
    other = shared_platform.worker("ck(driver.cuInit(0))")
    worker.do("begin(); put(p, 5, MIB); ck(driver.cuMemcpyDtoDAsync(q, p, MIB, s)); g = end()")
    worker.do("e = instantiate(g); write(p, bytes(MIB)); write(q, bytes(MIB))")
    other.do(f"suspend({worker.pid}); resume({worker.pid})")
    assert worker.get("read(q, MIB) == bytes(MIB)")
    worker.do("run(e)")
    assert worker.get("set(read(q, MIB)) == {5}")
    worker.do("write(q, bytes(MIB)); run(instantiate(g))")
    assert worker.get("set(read(q, MIB)) == {5}")
