# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Two machines with the kernel's own KVM: a Debian guest moves between them in postcopy with
# fault_source=sigbus by a BPF program, and by the default where the right to load it is taken away.
# limit_s: 10800
# on_request
. ./lib.sh
. ./hosts.sh
. ./faults-hosts.sh

meet
must boots boots
moves sigbus_by_bpf sigbus sigbus
LAUNCH_WITH="/bin/setpriv --bounding-set=-bpf,-perfmon,-sys_admin --inh-caps=-bpf,-perfmon,-sys_admin"
moves without_rights auto uffd
check ends_well ends_well
on b ': >$T/done'
