#!/usr/bin/env bash
# Kiwi in containers of a real engine: podman, CDI, and user ids of their own. Needs root; installs podman and runc,
# which stay. KIWI_CLUSTER_PYTHON is a Python that users may run and that has Kiwi.
set -eu
cd "$(dirname "$0")"
if ! command -v podman >/dev/null || ! command -v runc >/dev/null; then
    echo "---- installs Debian packages, which stay: podman runc"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends podman runc >/dev/null
fi
exec "${KIWI_CLUSTER_PYTHON:?}" -I checks.py
