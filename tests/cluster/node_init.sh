#!/bin/sh
# PID 1 of an emulated node, in namespaces of its own. Arguments: the node's name, the work directory.
# What a cluster shares stays shared (/home, /usr, the work directory); what a machine has of its own is made here.
set -eu
name=$1 work=$2
mount --make-rprivate /
mount -t proc proc /proc
hostname "$name"
mkdir -p /opt/kiwi /var/cache/kiwi /etc/slurm /var/lib/kiwi
mount --bind "$work/opt" /opt/kiwi
mount --bind "$work/cache" /var/cache/kiwi
mount --bind "$work" /mnt
for dir in /run /tmp /etc/slurm /var/lib/kiwi /var/spool /var/log/munge /var/lib/munge; do
    mount -t tmpfs -o mode=0755 tmpfs "$dir"
done
chmod 1777 /tmp
mkdir -p "$work" && mount --bind /mnt "$work"
mkdir -p /run/munge /run/lock /var/spool/slurmd /var/spool/slurmctld
chown munge: /run/munge /var/log/munge /var/lib/munge && chmod 700 /var/log/munge /var/lib/munge
cp "$work"/etc/* /etc/slurm/
mount --bind "$work/hosts" /etc/hosts

# Devices: the machine's, and files that stand for two GPUs. The device cgroup knows them by their numbers.
dev=$(mktemp -d)
mount -t tmpfs -o mode=0755 tmpfs "$dev"
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty "$dev"/
ln -s pts/ptmx "$dev/ptmx"
ln -s /proc/self/fd "$dev/fd"
mkdir "$dev/pts" "$dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts "$dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$dev/shm"
if [ "$name" != head ]; then
    for number in 0 1; do mknod -m 666 "$dev/nvidia$number" c 195 "$number"; done
    mknod -m 666 "$dev/nvidiactl" c 195 255
fi
mount --move "$dev" /dev
mount -t tmpfs -o mode=0755 tmpfs /proc/driver # for what NVIDIA's module would list there
ip link set lo up
trap '' CHLD # the kernel reaps children that nobody waits for
exec sleep infinity
