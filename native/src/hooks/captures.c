/* Open stream captures. The gate does not close while one is open: synchronising would break the capture, and
 * its calls could not go on. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>

#include "hooks/hooks.h"

#include "base/log.h"
#include "base/real.h"

static struct capture {
    struct capture *next;
    CUstream stream;
    pthread_t thread; /* the per-thread default streams of all threads share one handle */
} *open_captures;
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static __thread int mine; /* open captures that this thread began */

static bool of_thread(CUstream stream) { return stream == CU_STREAM_PER_THREAD || !stream; }

void kp_capture_begun(CUstream stream) {
    if (kp_disabled()) return;
    struct capture *new = malloc(sizeof *new);
    if (!new) {
        kp_warn("no memory to note a stream capture: paging may break it");
        return;
    }
    *new = (struct capture){NULL, stream, pthread_self()};
    pthread_mutex_lock(&mu);
    new->next = open_captures;
    open_captures = new;
    pthread_mutex_unlock(&mu);
    mine++;
    kp_gate_captures(1);
}

void kp_capture_dropped(CUstream stream) {
    if (kp_disabled()) return;
    pthread_mutex_lock(&mu);
    struct capture **at = &open_captures;
    while (*at && ((*at)->stream != stream ||
                   (of_thread(stream) && !pthread_equal((*at)->thread, pthread_self()))))
        at = &(*at)->next;
    struct capture *found = *at;
    if (found) *at = found->next;
    pthread_mutex_unlock(&mu);
    if (!found) return;
    if (pthread_equal(found->thread, pthread_self())) mine--;
    free(found);
    kp_gate_captures(-1);
    if (kp_owning() && !kp_gate_capturing()) kp_own_captures_over();
}

/* Returns whether the capture is still open: ending it fails if another thread began it, while an invalidated
 * capture ends with an error. */
static bool goes_on(CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    return kp_real.cuStreamIsCapturing &&
           kp_real.cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS &&
           status != CU_STREAM_CAPTURE_STATUS_NONE;
}

void kp_capture_ended(CUstream stream) {
    if (!goes_on(stream)) kp_capture_dropped(stream);
}

/* ---- the driver's calls, each for both kinds of default stream ---- */

/* A thread that has a capture open and begins another must not wait for the first to end. */
#define BEGINS(name, params, args)                                                                   \
    KP_API CUresult name params {                                                                    \
        DRIVER(name);                                                                                \
        bool entered = mine > 0 ? kp_gate_enter() : kp_gate_enter_capture();                         \
        CUresult result = real args;                                                                 \
        if (result == CUDA_SUCCESS) kp_capture_begun(stream);                                        \
        kp_gate_leave(entered);                                                                      \
        return result;                                                                               \
    }
#define ENDS(name, params, args)                                                                     \
    KP_API CUresult name params {                                                                    \
        DRIVER(name);                                                                                \
        bool entered = kp_gate_enter_other();                                                        \
        CUresult result = real args;                                                                 \
        kp_capture_ended(stream); /* asks the driver */                                              \
        kp_gate_leave(entered);                                                                      \
        return result;                                                                               \
    }
#define BOTH(what, name, params, args) what(name, params, args) what(name##_ptsz, params, args)

BOTH(BEGINS, cuStreamBeginCapture, (CUstream stream), (stream))
BOTH(BEGINS, cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode), (stream, mode))
BOTH(BEGINS, cuStreamBeginCaptureToGraph,
     (CUstream stream, CUgraph graph, const CUgraphNode *nodes, const CUgraphEdgeData *edges, size_t count,
      CUstreamCaptureMode mode),
     (stream, graph, nodes, edges, count, mode))
BOTH(ENDS, cuStreamEndCapture, (CUstream stream, CUgraph *graph), (stream, graph))
#if CUDA_VERSION >= 13010
BOTH(BEGINS, cuStreamBeginCaptureToCig, (CUstream stream, CUstreamCigCaptureParams *params), (stream, params))
BOTH(ENDS, cuStreamEndCaptureToCig, (CUstream stream), (stream))
#endif
#if CUDA_VERSION >= 13030
BOTH(BEGINS, cuStreamBeginRecaptureToGraph,
     (CUstream stream, CUstreamCaptureMode mode, CUgraph graph, CUgraphRecaptureCallback callback, void *data),
     (stream, mode, graph, callback, data))
#endif

HOOK(COUNTED, cuStreamDestroy_v2, (CUstream stream), real(stream), if (result == CUDA_SUCCESS) kp_capture_dropped(stream))
