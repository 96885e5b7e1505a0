# The disk that a workload works on, for the workloads that end. They source it after `serial`.

doing='mounting the disk'
disk=/srv/disk
mkdir "$disk"
mount -t ext4 /dev/vdb "$disk"
cd "$disk"

# All that was written is on the disk. The guest is idle from here on.
ended() {
    doing='writing back'
    sync
    unit
    doing='idle'
    while :; do
        sleep 1000
    done
}
