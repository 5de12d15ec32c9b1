# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the groups about balloons share: the host's view of a guest's memory, and counters.

MIB=1048576
# blocks NAME: MiB that the host has for the guest's memory.
blocks() {
  for fd in /proc/"$(cat $T/$1.pid)"/fd/*; do
    case $(readlink "$fd") in
      *memfd:ram-* | *memfd:memory-backend-memfd*) stat -L -c '%b' "$fd" | awk '{ print int($1 * 512 / 1048576) }' && return ;;
    esac
  done
}
below() { [ "$(blocks "$1")" -le "$2" ]; }
above() { [ "$(blocks "$1")" -ge "$2" ]; }
# counter NAME COUNTER: of the balloon.
counter() { remote "$1" counters | tr ',{}' '\n\n\n' | sed -n "s/^ *\"$2\": *\([0-9]*\).*/\1/p" | head -n 1; }
actual_is() { [ "$(counter "$1" actual_bytes)" = $(($2 * MIB)) ]; }
has_statistics() { [ "$(counter "$1" statistics_updates)" -ge 2 ] 2>/dev/null; }
now_ms() { awk '{ print int($1 * 1000) }' /proc/uptime; }
# reportable NAME: puts the MiB of free memory that Linux reports into $free: blocks of 2 and 4 MiB, but
# for the first zone, which is too small for it.
reportable() { guest $1 "awk '/zone +(DMA32|Normal)/ { mib += \$14 * 2 + \$15 * 4 } END { print mib + 0 }' /proc/buddyinfo" && free=$(cat $T/out); }

BALLOON=size=0,deflate_on_oom=on,free_page_reporting=on,free_page_hinting=on,statistics_interval_s=1
