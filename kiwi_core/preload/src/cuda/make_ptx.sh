#!/bin/sh
# Makes hash_ptx.h from hash.cu. Only needed when hash.cu changes; needs nvcc (CUDA 12.8 or later).
# Nothing in the text is newer than PTX 6.0, so it says so: older drivers take it, too.
set -eu
cd "$(dirname "$0")"
text=$(mktemp)
trap 'rm -f "$text"' EXIT
nvcc -ptx -arch=compute_75 -O3 -o "$text" hash.cu
{
    echo '/* Made by make_ptx.sh from hash.cu: do not edit. */'
    echo 'static const char kp_hash_ptx[] ='
    sed -e '/^\/\//d' -e '/^$/d' -e 's/^\.version .*/.version 6.0/' -e 's/^\.target .*/.target sm_60/' \
        -e 's/[[:space:]]*\/\/.*//' -e 's/^[[:space:]]*$//' -e '/^$/d' \
        -e 's/_ZZ16kiwi_hash_leavesE[0-9]*//g' -e 's/\\/\\\\/g' -e 's/"/\\"/g' -e 's/\t/ /g' -e 's/^/    "/' -e 's/$/\\n"/' "$text"
    echo '    ;'
} >hash_ptx.h
