# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The second machine of the group `hosts`: does what the first one says, until that says `done`.
. ./lib.sh
. ./hosts.sh

host_up $HOST_b || echo "the network did not come up"
nc -ll -p $CLOCK_PORT -e /bin/clock-answer </dev/null >/dev/null 2>&1 &
httpd -h /lab/www
wait_until "${PEER_S:-1500}" test -e $T/done
for log in $T/*.vmm.log $T/*.console; do
  [ -f "$log" ] && { echo "--- $log"; tail -n 25 "$log"; }
done
