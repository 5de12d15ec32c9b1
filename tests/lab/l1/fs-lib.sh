# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the groups with shared directories have in common: file servers, and what guest and host find of each other's files.
# The guest has $SHARE at /tmp/m.

GUEST_INITRAMFS=/lab/initramfs-fs.gz
SHARE=$T/share

# serves NAME DIRECTORY [OPTION]: a file server for this VMM, of that directory and at the socket of the same name, which
# serves one connection; another follows it until there is a file `last`.
serves() {
  mkdir -p $T/$1.fs $T/$2
  rm -f $T/$1.fs/last
  {
    until [ -e $T/$1.fs/last ]; do
      virtiofsd --socket-path=$T/$1.fs/$2 --shared-dir=$T/$2 --sandbox=none --log-level=warn ${3:-} >>$T/$1.fs/log 2>&1 &
      echo $! >$T/$1.fs/$2.pid
      wait $!
    done
  } >/dev/null 2>&1 &
}

# sum FILE: its checksum here. guest_sum NAME FILE: that which the guest finds.
sum() { sha256sum <$SHARE/$1; }
guest_sum() { guest $1 "sha256sum </tmp/m/$2" && tail -n 1 $T/out; }
same() { [ "$(guest_sum $1 $2)" = "$(sum $2)" ] || { cat $T/out; sum $2; return 1; }; }
mounts() { guest $1 "mkdir -p /tmp/m && busybox mount -t virtiofs share /tmp/m" || { cat $T/out; return 1; }; }

writes() { guest a "head -c 8388608 /dev/urandom >/tmp/m/of-guest && sync && sha256sum </tmp/m/of-guest" && [ "$(tail -n 1 $T/out)" = "$(sum of-guest)" ] && same a of-guest; }
# In the middle and at the end of a file, without a cache of the guest in between.
changes() {
  guest a "printf changed | dd of=/tmp/m/of-host bs=1 seek=123456 conv=notrunc 2>/dev/null && printf more >>/tmp/m/of-host && sync" &&
    [ "$(dd if=$SHARE/of-host bs=1 skip=123456 count=7 2>/dev/null)" = changed ] && [ "$(tail -c 4 $SHARE/of-host)" = more ] && same a of-host
}
names() {
  guest a "mkdir /tmp/m/d && for n in \$(seq 200); do echo \$n >/tmp/m/d/\$n; done && mv /tmp/m/d/7 /tmp/m/d/seven && rm /tmp/m/d/8 && ln -s seven /tmp/m/d/link && chmod 600 /tmp/m/d/9" || { cat $T/out; return 1; }
  [ "$(ls $SHARE/d | wc -l)" = 200 ] && [ "$(cat $SHARE/d/link)" = 7 ] && [ "$(stat -c %a $SHARE/d/9)" = 600 ] && [ ! -e $SHARE/d/8 ]
}
appears() { echo now >$SHARE/d/now && guest a "cat /tmp/m/d/now; rm -r /tmp/m/d" && grep -qx now $T/out && [ ! -e $SHARE/d ]; }

# Lines until told to stop; each is written before the next.
works() { guest $1 "rm -f /tmp/stop; { n=0; while [ ! -e /tmp/stop ]; do n=\$((n+1)); echo \$n >>/tmp/m/lines || echo \$n >>/tmp/bad; sync; done; echo \$n >/tmp/count; } >/dev/null 2>&1 & sleep 1"; }
has_worked() { guest $1 "touch /tmp/stop; for i in \$(seq 600); do [ -s /tmp/count ] && break; sleep 0.1; done; cat /tmp/count; [ ! -e /tmp/bad ]" && [ "$(tail -n 1 $T/out)" = "$(wc -l <$SHARE/lines)" ] && [ "$(tail -n 1 $SHARE/lines)" = "$(wc -l <$SHARE/lines)" ]; }
lines_are_more() { [ "$(wc -l <$SHARE/lines)" -gt "$1" ]; }
pauses() {
  works a && wait_until 60 lines_are_more 3 || return 1
  for _ in 1 2 3; do
    remote a pause || return 1
    # Nothing is in flight.
    before=$(wc -l <$SHARE/lines)
    sleep 1
    [ "$(wc -l <$SHARE/lines)" = "$before" ] || { echo "written in a pause"; return 1; }
    remote a resume && wait_until 60 lines_are_more $before || return 1
  done
  has_worked a || { cat $T/out; return 1; }
}
reboots() { guest a sync && remote a reboot && wait_until $WAIT_S says_times a "GUEST-READY 1 vcpus" 2 && mounts a && same a of-guest && same a of-host; }
# lose NAME: the server of its directory is killed.
lose() {
  touch $T/$1.fs/last
  kill -9 $(cat $T/$1.fs/share.pid)
  wait_until 30 grep -q '"back-end-lost"' $T/$1.events
}

mkdir -p $SHARE
head -c 4194304 /dev/urandom >$SHARE/of-host
