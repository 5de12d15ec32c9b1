// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Every check, and every lack that it can find.
//!
//! Owns their names, what each lack costs, and the commands that mend it on Debian 12. `docs/check.md` is generated from
//! here. In commands, `$USER` is for the shell; other words in capitals are replaced by what was found: `PATH`, `FILE`,
//! `NAME`, `NUMBER`, `GROUP`, `ADDRESS`, `PROGRAM`, `MODULE`.

use super::finding::{Check, Lack, Severity};

macro_rules! checks {
    ($($check:ident = $name:literal, $what:literal {
        $($lack:ident = $reason:literal, $severity:ident, $cost:literal, [$($mend:literal),*];)*
    })*) => {
        $(
            pub static $check: Check = Check { name: $name, what: $what };
            $(
                pub static $lack: Lack = Lack {
                    check: &$check,
                    reason: $reason,
                    severity: Severity::$severity,
                    cost: $cost,
                    mend: &[$($mend),*],
                };
            )*
        )*
        /// All of them, in the order of the report.
        #[cfg(test)]
        pub static ALL: &[(&Check, &[&Lack])] = &[$((&$check, &[$(&$lack),*])),*];
    };
}

checks! {
    KERNEL = "kernel", "the release of the host's kernel" {
        OLD_KERNEL = "old", Costs, "kernels before 6.1, that of Debian 12, are not tested, and lack what is used where it is there",
            ["sudo apt-get install linux-image-amd64", "sudo reboot"];
    }
    SECCOMP = "seccomp", "whether system calls can be filtered" {
        NO_SECCOMP = "missing", Fails, "the VMM does not start without its filters of system calls, unless with --seccomp false",
            ["sudo apt-get install linux-image-amd64", "sudo reboot"];
    }
    LANDLOCK = "landlock", "whether the VMM can be confined to its files, and the paths of --landlock-rules" {
        NO_LANDLOCK = "missing", Costs, "VMs cannot be started with --landlock",
            ["sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&lsm=landlock,lockdown,yama,integrity,apparmor,bpf /' /etc/default/grub", "sudo update-grub", "sudo reboot"];
        LANDLOCK_WANTED = "wanted", Fails, "the VM is to be confined by Landlock, and is not started without",
            ["sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&lsm=landlock,lockdown,yama,integrity,apparmor,bpf /' /etc/default/grub", "sudo update-grub", "sudo reboot"];
        LANDLOCK_PATH = "path-missing", Fails, "a path of --landlock-rules has to be there when the VM starts", [];
    }
    IO_URING = "io-uring", "whether disks can use io_uring" {
        NO_IO_URING = "missing", Costs, "requests of disks are served one by one by system calls that wait, which is slower",
            ["sudo sysctl -w kernel.io_uring_disabled=0"];
    }
    KVM = "kvm", "/dev/kvm: whether it is there, may be used, and has all required capabilities" {
        KVM_MISSING = "missing", Fails, "without KVM no VM runs",
            ["sudo modprobe kvm_intel || sudo modprobe kvm_amd"];
        KVM_DENIED = "denied", Fails, "without KVM no VM runs",
            ["sudo usermod -aG kvm $USER", "newgrp kvm"];
        KVM_VERSION = "other-version", Fails, "what answers at /dev/kvm is not KVM, and without KVM no VM runs", [];
        KVM_INCAPABLE = "incapable", Fails, "this KVM lacks what every VM needs",
            ["sudo apt-get install linux-image-amd64", "sudo reboot"];
        KVM_FAILED = "failed", Fails, "without KVM no VM runs", [];
    }
    PAGING = "paging", "whether KVM uses two-dimensional paging (EPT, NPT) or shadow paging" {
        SHADOW_PAGING = "shadow", Costs, "the guest's changes of its page tables are trapped, which makes it much slower, and in postcopy its vCPUs always wait in userfaultfd unless KVM is patched",
            ["echo 'options MODULE' | sudo tee /etc/modprobe.d/godwit.conf", "sudo update-initramfs -u", "sudo reboot"];
    }
    VCPUS = "vcpus", "the number and features of vCPUs (--cpus) against KVM, and against the CPUs of this process" {
        VCPUS_TOO_MANY = "too-many", Fails, "KVM makes no more vCPUs", [];
        VCPUS_LATER = "too-many-later", Costs, "vCPUs beyond that number cannot be added while the guest runs", [];
        VCPUS_FEATURES = "features", Fails, "the host has no vCPUs with these options", [];
        VCPUS_SHARED = "overcommitted", Costs, "vCPUs take turns on the CPUs of this process, which delays the guest", [];
    }
    DIRTY_LOG = "dirty-log", "how KVM tells which pages the guest has written, for migration" {
        PLAIN_DIRTY_LOG = "not-manual", Costs, "each round of a migration write-protects all guest memory at once, which slows the guest down",
            ["sudo apt-get install linux-image-amd64", "sudo reboot"];
    }
    USERFAULTFD = "userfaultfd", "by which way userfaultfd can be used, and which of its features there are" {
        UFFD_DENIED = "denied", Costs, "the VM cannot arrive in postcopy, nor be restored on demand",
            ["sudo chgrp kvm /dev/userfaultfd", "sudo chmod 660 /dev/userfaultfd"];
        UFFD_MISSING = "missing", Costs, "the VM cannot arrive in postcopy, nor be restored on demand",
            ["sudo apt-get install linux-image-amd64", "sudo reboot"];
        UFFD_FEATURES = "features", Costs, "a VM with this kind of memory cannot arrive in postcopy, nor be restored on demand", [];
    }
    FAULT_SOURCE = "fault-source", "what receive-migration fault_source=auto chooses for such a VM, and why" {
        FAULTS_BY_UFFD = "uffd", Costs, "in postcopy vCPUs wait for missing pages in one queue that all share, and another thread wakes them",
            ["sudo apt-get install ./godwit-kvm_*.deb", "sudo godwit-kvm update", "sudo godwit-kvm load"];
    }
    FAULT_TRACE = "fault-trace", "whether fault_source=sigbus can be had on a KVM without the bundled patches, by BPF" {
        TRACE_DENIED = "denied", Costs, "fault_source=sigbus cannot be used",
            ["sudo setcap cap_bpf,cap_perfmon+ep PROGRAM"];
        TRACE_UNREADABLE = "unreadable", Costs, "fault_source=sigbus cannot be used",
            ["sudo sysctl -w kernel.unprivileged_bpf_disabled=0"];
        TRACE_FAILED = "failed", Costs, "fault_source=sigbus cannot be used", [];
    }
    HUGE_PAGES = "huge-pages", "hugetlb pages of the host, by size and node, against --memory hugepages=on" {
        HUGE_PAGES_FEW = "too-few", Fails, "guest memory cannot be made",
            ["echo $(($(cat FILE) + NUMBER)) | sudo tee FILE"];
        HUGE_PAGES_FEW_ON_NODE = "too-few-on-node", Fails, "guest memory cannot be made on its node",
            ["echo $(($(cat FILE) + NUMBER)) | sudo tee FILE"];
        HUGE_PAGES_SIZE = "no-such-size", Fails, "guest memory cannot be made",
            ["sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&hugepagesz=NUMBERK /' /etc/default/grub", "sudo update-grub", "sudo reboot"];
    }
    MEMORY_ZONES = "memory-zones", "whether guest memory (--memory, --memory-zone) can be made" {
        ZONE_NODE = "no-such-node", Fails, "guest memory cannot be made on a node that is not there", [];
        ZONE_RESERVE = "not-reservable", Fails, "with reserve=on the host has to have RAM and swap for all of guest memory", [];
        ZONE_FILE = "file", Fails, "guest memory cannot be made in this file", [];
        ZONE_OTHER = "impossible", Fails, "guest memory cannot be made", [];
    }
    MEMORY_ROOM = "memory-room", "available memory of host, nodes and cgroups against guest memory" {
        ROOM_BOOT = "too-little", Fails, "with prefault=on all of guest memory has to be available when the VM starts", [];
        ROOM_PINNED = "too-little-to-pin", Fails, "passed-through devices have all of guest memory populated and pinned, and cannot be used", [];
        ROOM_LATER = "too-little-later", Costs, "when the guest uses all of its memory the kernel swaps, or ends this or another process for lack of memory", [];
    }
    THP = "transparent-huge-pages", "whether guest memory gets transparent huge pages" {
        THP_PRIVATE = "none-private", Costs, "the guest runs on pages of 4 KiB, and spends more time on translating addresses",
            ["echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"];
        THP_SHARED = "none-shared", Costs, "the guest runs on pages of 4 KiB, and spends more time on translating addresses",
            ["echo advise | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled"];
    }
    POOL = "prezero-pool", "the socket of the pool that --memory prezeroed= names" {
        NO_POOL = "missing", Costs, "guest memory is allocated and zeroed by the VMM, which takes longer",
            ["sudo systemctl start prezero-pool"];
        POOL_DENIED = "denied", Costs, "guest memory is allocated and zeroed by the VMM, which takes longer", [];
    }
    IOMMU = "iommu", "the IOMMUs of the host, and its IOMMU groups" {
        NO_IOMMU = "missing", Costs, "no device of the host can be passed through",
            ["sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&intel_iommu=on /' /etc/default/grub", "sudo update-grub", "sudo reboot"];
    }
    VFIO = "vfio", "/dev/vfio/vfio, for devices that are passed through by type1" {
        NO_VFIO = "unavailable", Costs, "no device of the host can be passed through by type1",
            ["sudo modprobe -a vfio-pci vfio_iommu_type1"];
        VFIO_WANTED = "wanted", Fails, "the devices of the VM cannot be passed through",
            ["sudo modprobe -a vfio-pci vfio_iommu_type1", "sudo chmod 666 /dev/vfio/vfio"];
    }
    IOMMUFD = "iommufd", "/dev/iommu, for devices that are passed through by --platform iommufd=on" {
        NO_IOMMUFD = "unavailable", Costs, "no device of the host can be passed through by iommufd, nor have memory of a pool that is mapped for it already",
            ["sudo modprobe iommufd"];
        IOMMUFD_WANTED = "wanted", Fails, "the devices of the VM cannot be passed through",
            ["sudo modprobe iommufd", "sudo chown $USER /dev/iommu"];
    }
    DEVICE = "device", "each --device: whether it is there, in an IOMMU group, bound to a VFIO driver, and reaches guest memory" {
        DEVICE_MISSING = "missing", Fails, "the device cannot be passed through", ["ls /sys/bus/pci/devices"];
        DEVICE_NO_GROUP = "no-group", Fails, "the device cannot be passed through",
            ["sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&intel_iommu=on /' /etc/default/grub", "sudo update-grub", "sudo reboot"];
        DEVICE_DRIVER = "driver", Fails, "the device cannot be passed through",
            ["sudo modprobe vfio-pci", "echo vfio-pci | sudo tee PATH/driver_override", "test ! -e PATH/driver || echo ADDRESS | sudo tee PATH/driver/unbind", "echo ADDRESS | sudo tee /sys/bus/pci/drivers_probe"];
        DEVICE_REACH = "unreachable-memory", Fails, "guest memory would be at addresses that the device cannot use", [];
        DEVICE_OTHER = "failed", Fails, "the device cannot be passed through", [];
    }
    DEVICE_NODE = "device-node", "the node in /dev/vfio by which each --device is opened" {
        NODE_DENIED = "denied", Fails, "the device cannot be passed through", ["sudo chown $USER PATH"];
        NODE_MISSING = "missing", Fails, "the device cannot be passed through", ["sudo modprobe vfio-pci"];
    }
    DEVICE_GROUP = "device-group", "the other functions in the IOMMU group of each --device" {
        GROUP_BOUND = "bound-elsewhere", Fails, "the kernel lends no function of the group to a VM while a driver of the host uses one",
            ["echo vfio-pci | sudo tee /sys/bus/pci/devices/ADDRESS/driver_override", "echo ADDRESS | sudo tee /sys/bus/pci/devices/ADDRESS/driver/unbind", "echo ADDRESS | sudo tee /sys/bus/pci/drivers_probe"];
    }
    DEVICE_RESET = "device-reset", "whether the host can reset each --device alone" {
        NO_RESET = "missing", Costs, "the device may be given to the guest with what it was used for before, unless its bus can be reset without others", [];
    }
    DMA_LIMITS = "dma-limits", "the limits on locked memory and of cgroups against what is pinned for passed-through devices" {
        MEMLOCK_LOW = "memlock", Fails, "guest memory cannot be pinned, and the VM with its passed-through devices does not start",
            ["sudo prlimit --memlock=NUMBER:NUMBER --pid $$"];
        PIN_CGROUP_LOW = "cgroup", Fails, "guest memory cannot be pinned, and the VM with its passed-through devices does not start",
            ["echo max | sudo tee FILE"];
    }
    TUN = "tun", "/dev/net/tun and CAP_NET_ADMIN, for taps" {
        NO_TUN = "missing", Costs, "the VM cannot have taps", ["sudo modprobe tun"];
        TUN_DENIED = "denied", Costs, "the VM cannot have taps", ["sudo chmod 666 /dev/net/tun"];
    }
    TAP = "tap", "the tap of each --net: whether it is there or may be made, and may be used and configured" {
        TAP_MISSING = "missing", Fails, "the network device has no tap",
            ["sudo ip tuntap add dev NAME mode tap user $USER", "sudo ip link set dev NAME up"];
        TAP_DENIED = "denied", Fails, "the network device has no tap",
            ["sudo ip tuntap del dev NAME mode tap", "sudo ip tuntap add dev NAME mode tap user $USER", "sudo ip link set dev NAME up"];
        TAP_KIND = "kind", Fails, "the network device has no tap", ["ip -details link show dev NAME"];
        TAP_IN_USE = "in-use", Fails, "a tap is for one VM at a time",
            ["sudo grep -l 'iff:.*NAME' /proc/[0-9]*/fdinfo/*"];
        TAP_CONFIGURE = "not-configurable", Fails, "the tap of the network device cannot be configured",
            ["sudo setcap cap_net_admin+ep PROGRAM"];
        TAP_DRIVER = "driver", Fails, "the network device has no tap",
            ["sudo modprobe tun", "sudo chmod 666 /dev/net/tun"];
    }
    PAYLOAD = "payload", "kernel, initramfs and firmware: whether they can be loaded into guest memory" {
        PAYLOAD_FAILED = "unusable", Fails, "the VM has nothing to boot", [];
    }
    DISK = "disk", "the image of each --disk: whether it can be opened, is of the format, and is not locked" {
        DISK_MISSING = "missing", Fails, "the VM does not start without its disk", ["ls -l PATH"];
        DISK_DENIED = "denied", Fails, "the VM does not start without its disk", ["ls -l PATH"];
        DISK_IN_USE = "in-use", Fails, "an image that is written is for one VM at a time", ["sudo fuser -v PATH"];
        DISK_FAILED = "unusable", Fails, "the VM does not start without its disk", [];
    }
    PMEM = "pmem", "the file of each --pmem" {
        PMEM_FAILED = "unusable", Fails, "the VM does not start without its persistent memory", ["ls -l PATH"];
    }
    RNG = "rng", "the source of entropy (--rng)" {
        RNG_FAILED = "unusable", Fails, "the VM does not start without its entropy device", ["ls -l PATH"];
    }
    BACK_END = "back-end", "sockets and nodes of what other processes and the kernel serve: vhost-user, vfio-user, TPM, vDPA; none is connected to" {
        BACK_END_MISSING = "missing", Fails, "the VM does not start without its device", ["ls -l PATH"];
        BACK_END_DENIED = "denied", Fails, "the VM does not start without its device", ["ls -l PATH"];
        BACK_END_KIND = "kind", Fails, "the VM does not start without its device", ["ls -l PATH"];
    }
    OUTPUT = "output", "files and sockets that the VMM makes: consoles, vsock, vhost-user servers" {
        OUTPUT_FOLDER = "no-folder", Fails, "the VMM cannot make the file or socket", ["mkdir -p PATH"];
        OUTPUT_DENIED = "denied", Fails, "the VMM cannot make the file or socket", ["ls -ld PATH"];
    }
    OPEN_FILES = "open-files", "the limit on open files against vCPUs, queues and devices" {
        FILES_FEW = "too-few", Fails, "devices cannot be opened",
            ["ulimit -n NUMBER || sudo prlimit --nofile=NUMBER:NUMBER --pid $$"];
        FILES_SCARCE = "scarce", Costs, "devices that are added while the guest runs, and migrations, may be refused",
            ["ulimit -n NUMBER || sudo prlimit --nofile=NUMBER:NUMBER --pid $$"];
    }
    THREADS = "threads", "limits on threads (pids.max, RLIMIT_NPROC) against vCPUs and queues" {
        THREADS_FEW = "too-few", Fails, "threads of vCPUs or devices cannot be started", ["echo max | sudo tee FILE"];
        THREADS_SCARCE = "scarce", Costs, "devices that are added while the guest runs, and migrations, may be refused",
            ["echo max | sudo tee FILE"];
        USER_THREADS_FEW = "too-few-of-user", Fails, "threads of vCPUs or devices cannot be started",
            ["sudo prlimit --nproc=NUMBER:NUMBER --pid $$"];
    }
    CPU_QUOTA = "cpu-quota", "cpu.max of the process's cgroups against vCPUs" {
        CPU_QUOTA_LOW = "below-vcpus", Costs, "when all vCPUs are busy they are stopped for a part of each period, which the guest sees as stolen time",
            ["echo max | sudo tee FILE"];
    }
    CGROUP_MEMORY = "cgroup-memory", "memory limits of cgroups of version 1 against guest memory" {
        CGROUP_MEMORY_LOW = "below-guest", Costs, "when the guest uses its memory the kernel ends a process of the cgroup for lack of memory",
            ["echo -1 | sudo tee FILE"];
    }
}
