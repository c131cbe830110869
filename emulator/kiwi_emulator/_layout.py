"""The layout of the state file, as in ``src/state.h``; a test compares the two."""

from __future__ import annotations

import ctypes

MAGIC = b"KIWIEMU1"
LAYOUT = 4
GPUS_MAX = 16
PROCS_MAX = 256
FAULTS_MAX = 64
NAME_MAX = 96
DRIVER_MAX = 32


class Gpu(ctypes.Structure):
    _fields_ = [
        ("uuid", ctypes.c_uint8 * 16),
        ("name", ctypes.c_char * NAME_MAX),
        ("total_bytes", ctypes.c_uint64),
        ("lost", ctypes.c_uint64),
    ]


class Proc(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_int32),
        ("state", ctypes.c_uint32),
        ("pid_ns", ctypes.c_uint64),
        ("start_ticks", ctypes.c_uint64),
        ("image", ctypes.c_uint64),
        ("since_ns", ctypes.c_uint64),
        ("checkpoints", ctypes.c_uint32),
        ("restores", ctypes.c_uint32),
        ("device_bytes", ctypes.c_uint64 * GPUS_MAX),
        ("context_bytes", ctypes.c_uint64 * GPUS_MAX),
        ("busy_ns", ctypes.c_uint64 * GPUS_MAX),
        ("busy_since_ns", ctypes.c_uint64 * GPUS_MAX),
        ("parked_bytes", ctypes.c_uint64 * GPUS_MAX),
        ("kept_bytes", ctypes.c_uint64 * GPUS_MAX),
    ]


class FaultSlot(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("pid", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("op", ctypes.c_uint32),
        ("duration_ns", ctypes.c_uint64),
        ("hits", ctypes.c_uint32),
        ("in_progress", ctypes.c_uint32),
    ]


class DriverState(ctypes.Structure):
    _fields_ = [
        ("magic", ctypes.c_char * 8),
        ("layout", ctypes.c_uint32),
        ("gpu_count", ctypes.c_uint32),
        ("driver_version", ctypes.c_uint32),
        ("mutex_ready", ctypes.c_uint32),
        ("context_bytes", ctypes.c_uint64),
        ("copy_bytes_per_s", ctypes.c_uint64),
        ("write_seq", ctypes.c_uint64),
        ("quirks", ctypes.c_uint32),
        ("host_down", ctypes.c_int32),
        ("stream_bytes", ctypes.c_uint64),
        ("driver_name", ctypes.c_char * DRIVER_MAX),
        ("lock", ctypes.c_uint8 * 64),
        ("gpus", Gpu * GPUS_MAX),
        ("faults", FaultSlot * FAULTS_MAX),
        ("procs", Proc * PROCS_MAX),
    ]
