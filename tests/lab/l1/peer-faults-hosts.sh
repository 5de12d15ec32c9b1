# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The second machine of the group `faults-hosts`: as the one of `hosts`, for as long as that takes.
PEER_S=100000
. ./peer-hosts.sh
