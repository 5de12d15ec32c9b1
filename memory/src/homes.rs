// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The NUMA nodes on which memory that is bound to none comes to lie, and which of them each chunk gets.
//!
//! The kernel takes a page from the node of the processor that asks for it first. A thread that may run anywhere is moved
//! between nodes in the middle of a chunk, and clears a page of another node than it runs on then. So memory without a
//! node is dealt out, chunk by chunk, to the nodes from which the process gets memory, of each the same part of what it has
//! free, so that none is exhausted while another has plenty. Each chunk is populated by threads that run there and nowhere
//! else. No policy is set for it: what the guest touches before comes from the node
//! of the vCPU.
//!
//! | memory policy of the process | nodes |
//! | --- | --- |
//! | none, or local | all with processors and memory that the process may use, if there are several |
//! | bound, or preferred nodes (`numactl --membind`, `--preferred`) | those of them with processors that it may use |
//! | interleaved (`numactl --interleave`), or unknown | none: each page is on another node |
//!
//! Owns that rule. Must never place memory against the affinity or the policy that an operator has given the process.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;

use crate::host::Host;
use crate::lanes::PageKind;
use crate::processors::allowed_cpus;
use crate::region::RamRegion;

/// Unit in which a file says how long its blocks are, whatever those of its file system are.
const BLOCK_BYTES: u64 = 512;

/// Nodes that a kernel can have on x86-64.
const NODES_MAX: usize = 1024;
const WORD_BITS: usize = libc::c_ulong::BITS as usize;

/// Flags in a policy's mode; with one of them its nodes are not those of the host.
const MPOL_MODE_FLAGS: libc::c_int = 0b111 << 13;
const MPOL_F_MEMS_ALLOWED: libc::c_ulong = 1 << 2;

const MPOL_PREFERRED_MANY: libc::c_int = 5;

/// Where a thread's memory comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MemoryPolicy {
    mode: libc::c_int,
    /// The nodes of the policy.
    nodes: Vec<u32>,
    /// The nodes that the thread may have memory of at all, by cpusets.
    allowed: Vec<u32>,
}

type NodeSet = [libc::c_ulong; NODES_MAX / WORD_BITS];

fn nodes_of(set: &NodeSet) -> Vec<u32> {
    let all = (0_u32..).zip(set.iter().flat_map(|word| (0..WORD_BITS).map(move |bit| word >> bit)));
    all.filter(|(_, bits)| bits & 1 == 1).map(|(node, _)| node).collect()
}

impl MemoryPolicy {
    /// That of the calling thread; `None` if the kernel does not say.
    fn of_thread() -> Option<Self> {
        let mut mode: libc::c_int = 0;
        let mut nodes: NodeSet = [0; NODES_MAX / WORD_BITS];
        let mut allowed = nodes;
        let no_address = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: the kernel writes one number, and bits of a set of `NODES_MAX`, which both live across the call.
        let policy = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &raw mut mode,
                nodes.as_mut_ptr(),
                NODES_MAX,
                no_address,
                0 as libc::c_ulong,
            )
        };
        // SAFETY: as above, without the number.
        let mems = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                std::ptr::null_mut::<libc::c_int>(),
                allowed.as_mut_ptr(),
                NODES_MAX,
                no_address,
                MPOL_F_MEMS_ALLOWED,
            )
        };
        let is_known = policy == 0 && mems == 0;
        is_known.then(|| Self { mode, nodes: nodes_of(&nodes), allowed: nodes_of(&allowed) })
    }
}

/// A node on which memory without one may lie.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Home {
    node: u32,
    /// What is known of its room.
    room: Vec<Room>,
}

/// Room on a node for memory of one class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Room {
    /// Size of the hugetlb page, or 0 for all other memory.
    class: u64,
    free_bytes: u64,
    /// What it was dealt of that.
    dealt_bytes: u64,
}

impl Room {
    fn new(class: u64, free_bytes: u64) -> Self {
        Self { class, free_bytes, dealt_bytes: 0 }
    }

    /// What is dealt of it with `more`, if that is there.
    fn dealt_with(&self, more_bytes: u64) -> Option<u64> {
        let dealt_bytes = self.dealt_bytes.checked_add(more_bytes)?;
        (dealt_bytes <= self.free_bytes).then_some(dealt_bytes)
    }
}

impl Home {
    fn room(&self, class: u64) -> Option<&Room> {
        self.room.iter().find(|room| room.class == class)
    }
}

/// The nodes on which memory without a node of its own comes to lie; none if any thread may populate it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Homes(Vec<Home>);

impl Homes {
    /// These nodes, each with room for everything: for tests and benchmarks of hosts that are not at hand.
    pub fn pretended(nodes: &[u32]) -> Self {
        Self(nodes.iter().map(|node| Home { node: *node, room: Vec::new() }).collect())
    }

    /// Those of the calling thread and of threads that it starts, for `regions`.
    pub(crate) fn of_thread(host: &Host, regions: &[Arc<RamRegion>]) -> Self {
        if regions.iter().all(|region| region.spec().host_numa_node.is_some()) {
            return Self::default();
        }
        let Some(policy) = MemoryPolicy::of_thread() else { return Self::default() };
        let mut homes = Self::by(host, &policy, &allowed_cpus());
        if !homes.0.is_empty() {
            homes.look_for_room(host, &demands(regions));
        }
        homes
    }

    /// The nodes by a policy, for threads with these processors.
    fn by(host: &Host, policy: &MemoryPolicy, cpus: &[usize]) -> Self {
        let may_run = |node: &u32| host.node_cpus(*node).iter().any(|cpu| cpus.contains(cpu));
        let usable: Vec<_> = policy.allowed.iter().copied().filter(may_run).collect();
        // Threads are where its memory is in any case.
        if usable.len() < 2 {
            return Self::default();
        }
        let is_relative = policy.mode & libc::MPOL_F_RELATIVE_NODES != 0;
        let nodes = match policy.mode & !MPOL_MODE_FLAGS {
            libc::MPOL_DEFAULT | libc::MPOL_LOCAL => usable,
            libc::MPOL_PREFERRED if policy.nodes.is_empty() => usable,
            libc::MPOL_BIND | libc::MPOL_PREFERRED | MPOL_PREFERRED_MANY if !is_relative => {
                usable.into_iter().filter(|node| policy.nodes.contains(node)).collect()
            }
            _ => Vec::new(),
        };
        Self::pretended(&nodes)
    }

    /// Looks up what each node has free, without what is bound to it and will still be taken of that.
    fn look_for_room(&mut self, host: &Host, demands: &[Demand]) {
        let mut classes: Vec<u64> = demands.iter().map(|demand| demand.class).collect();
        classes.sort_unstable();
        classes.dedup();
        for Home { node, room } in &mut self.0 {
            let free = |class: u64| match class {
                0 => host.available_on_node(*node).map(|(free_bytes, _)| free_bytes),
                page => {
                    host.hugetlb_free_on_node(page, *node).map(|free| free.saturating_mul(page))
                }
            };
            let bound = |class: u64| -> u64 {
                let own = demands.iter().filter(|it| it.class == class && it.node == Some(*node));
                own.fold(0, |sum, demand| sum.saturating_add(demand.bytes))
            };
            let known = classes.iter().filter_map(|class| Some((*class, free(*class)?)));
            *room = known
                .map(|(class, free)| Room::new(class, free.saturating_sub(bound(class))))
                .collect();
        }
    }
}

/// Memory that is to be populated, and takes room when it is.
struct Demand {
    /// Size of its hugetlb page, or 0.
    class: u64,
    node: Option<u32>,
    bytes: u64,
}

/// What is bound to a node counts without the pages that it has already, from a pool or from before a reboot: what the node
/// has free is less by those.
fn demands(regions: &[Arc<RamRegion>]) -> Vec<Demand> {
    // Pages that a file has, by the address of its descriptor; a zone may have several regions.
    let mut of_files: BTreeMap<*const File, u64> = BTreeMap::new();
    let mut there = |region: &Arc<RamRegion>| {
        let Some(file) = region.file() else { return region.private_bytes() };
        let has = of_files.entry(Arc::as_ptr(file)).or_insert_with(|| pages_of(region, file));
        let part = (*has).min(region.usable_bytes());
        *has -= part;
        part
    };
    let demand = |region: &Arc<RamRegion>| {
        let node = region.spec().host_numa_node;
        let usable = region.usable_bytes();
        Demand {
            class: if region.is_hugetlb() { region.page_bytes() } else { 0 },
            node,
            bytes: if node.is_some() { usable.saturating_sub(there(region)) } else { usable },
        }
    };
    regions.iter().map(demand).collect()
}

/// How much memory the pages of a zone's file take: one call, whatever its length. A file on a disk says nothing of that.
fn pages_of(region: &RamRegion, file: &File) -> u64 {
    if !region.is_hugetlb() && !region.takes_host_memory() {
        return 0;
    }
    file.metadata().map_or(0, |metadata| metadata.blocks().saturating_mul(BLOCK_BYTES))
}

/// Deals chunks out to nodes.
pub struct Dealer {
    homes: Homes,
    next: usize,
}

impl Dealer {
    pub fn new(homes: Homes) -> Self {
        Self { homes, next: 0 }
    }

    /// The node for the next chunk: that of which the smallest part of its room is dealt then, and the next in turn where the
    /// rooms are not known; the next at all if none has room for it.
    pub fn deal(&mut self, kind: PageKind, len_bytes: u64) -> Option<u32> {
        let count = self.homes.0.len();
        let class = if kind.is_hugetlb { kind.page_bytes } else { 0 };
        let in_turn = || {
            let places = (0..count).map(|step| (self.next + step) % count);
            places.filter_map(|at| Some((at, self.homes.0.get(at)?)))
        };
        let (first, _) = in_turn().next()?;
        let at = if kind.is_there {
            // It takes no room.
            first
        } else if in_turn().any(|(_, home)| home.room(class).is_none()) {
            let has_room = |home: &Home| {
                home.room(class).is_none_or(|room| room.dealt_with(len_bytes).is_some())
            };
            in_turn().find(|(_, home)| has_room(home)).map_or(first, |(at, _)| at)
        } else {
            let part = |(at, home): (usize, &Home)| {
                let room = home.room(class)?;
                Some((at, room.dealt_with(len_bytes)?, room.free_bytes))
            };
            let smaller = |one: &(usize, u64, u64), two: &(usize, u64, u64)| {
                let across = |dealt: u64, free: u64| u128::from(dealt) * u128::from(free);
                across(one.1, two.2).cmp(&across(two.1, one.2))
            };
            // Of equal ones the first in turn.
            in_turn().filter_map(part).min_by(smaller).map_or(first, |(at, ..)| at)
        };
        self.next = (at + 1) % count;
        let home = self.homes.0.get_mut(at)?;
        if let Some(room) = home.room.iter_mut().find(|room| room.class == class && !kind.is_there)
        {
            room.dealt_bytes = room.dealt_bytes.saturating_add(len_bytes);
        }
        Some(home.node)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::fs;
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::host::cpu_list;
    use crate::{RamLayout, ZoneSpec};

    const MPOL_INTERLEAVE: libc::c_int = 3;
    const MPOL_WEIGHTED_INTERLEAVE: libc::c_int = 6;
    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;
    const SMALL: PageKind =
        PageKind { page_bytes: 4096, is_hugetlb: false, is_shared: true, is_there: false };
    const HUGE: PageKind = PageKind { page_bytes: GIB, is_hugetlb: true, ..SMALL };

    fn write(root: &Path, file: &str, text: &str) {
        let path = root.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Two sockets with four processors each, and memory without processors.
    fn topology(root: &Path) -> Host {
        for (node, cpus) in [(0, "0-3\n"), (1, "4-7\n"), (2, "\n")] {
            write(root, &format!("sys/devices/system/node/node{node}/cpulist"), cpus);
        }
        Host::pretended(root)
    }

    fn policy(mode: libc::c_int, nodes: &[u32]) -> MemoryPolicy {
        MemoryPolicy { mode, nodes: nodes.to_vec(), allowed: vec![0, 1, 2] }
    }

    fn nodes(homes: &Homes) -> Vec<u32> {
        homes.0.iter().map(|home| home.node).collect()
    }

    const ALL: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

    #[test]
    fn memory_lies_where_the_process_may_run_and_have_memory() {
        let root = tempfile::tempdir().unwrap();
        let host = topology(root.path());
        let by = |policy: &MemoryPolicy, cpus: &[usize]| nodes(&Homes::by(&host, policy, cpus));
        for mode in [libc::MPOL_DEFAULT, libc::MPOL_LOCAL, libc::MPOL_PREFERRED] {
            assert_eq!(by(&policy(mode, &[]), &ALL), [0, 1], "{mode}");
            assert_eq!(by(&policy(mode, &[]), &[3, 4]), [0, 1], "a processor of each");
            assert_eq!(by(&policy(mode, &[]), &[4, 5]), [0; 0], "all threads are there anyway");
        }
        let one = MemoryPolicy { allowed: vec![1], ..policy(libc::MPOL_DEFAULT, &[]) };
        assert_eq!(by(&one, &ALL), [0; 0], "a cpuset with the memory of one");
        assert_eq!(by(&policy(libc::MPOL_DEFAULT, &[]), &[]), [0; 0], "processors are not known");
        let unknown = Host::pretended(&root.path().join("nothing"));
        assert_eq!(nodes(&Homes::by(&unknown, &policy(libc::MPOL_DEFAULT, &[]), &ALL)), [0; 0]);
    }

    #[test]
    fn the_policy_of_an_operator_is_kept() {
        let root = tempfile::tempdir().unwrap();
        let host = topology(root.path());
        let by = |mode, of: &[u32]| nodes(&Homes::by(&host, &policy(mode, of), &ALL));
        for mode in [libc::MPOL_BIND, libc::MPOL_PREFERRED, MPOL_PREFERRED_MANY] {
            assert_eq!(by(mode, &[1]), [1], "{mode}");
            assert_eq!(by(mode, &[2]), [0; 0], "no processor is near");
            assert_eq!(by(mode | 1 << 15, &[1]), [1], "nodes of the host, whatever cpusets do");
            assert_eq!(
                by(mode | libc::MPOL_F_RELATIVE_NODES, &[1]),
                [0; 0],
                "which nodes is not known"
            );
        }
        assert_eq!(by(libc::MPOL_BIND, &[0, 1, 2]), [0, 1]);
        for mode in [MPOL_INTERLEAVE, MPOL_WEIGHTED_INTERLEAVE, 7, -1] {
            assert_eq!(by(mode, &[0, 1]), [0; 0], "{mode}: each page is on another");
        }
    }

    #[test]
    fn nodes_are_dealt_the_same_part_of_what_they_have_free() {
        let root = tempfile::tempdir().unwrap();
        let host = topology(root.path());
        for (node, free) in [(0, 3_u64), (1, 10)] {
            let kib = free << 20;
            let text = format!("Node {node} MemTotal: {kib} kB\nNode {node} MemFree: {kib} kB\n");
            let base = format!("sys/devices/system/node/node{node}");
            write(root.path(), &format!("{base}/meminfo"), &text);
            let pages = if node == 0 { "5" } else { "1" };
            let file = format!("{base}/hugepages/hugepages-1048576kB/free_hugepages");
            write(root.path(), &file, pages);
        }
        let mut homes = Homes::by(&host, &policy(libc::MPOL_DEFAULT, &[]), &ALL);
        let bound = Demand { class: 0, node: Some(0), bytes: GIB };
        let demands = [
            bound,
            Demand { class: 0, node: None, bytes: 8 * GIB },
            Demand { class: GIB, node: None, bytes: 4 * GIB },
        ];
        homes.look_for_room(&host, &demands);
        let mut dealer = Dealer::new(homes);
        let mut deal = |kind, count: usize| -> Vec<_> {
            (0..count).map(|_| dealer.deal(kind, GIB).unwrap()).collect()
        };
        assert_eq!(deal(SMALL, 6), [1, 1, 1, 1, 0, 1], "one of three is bound elsewhere");
        assert_eq!(deal(HUGE, 5), [0, 0, 0, 0, 1], "pages are those of the pool");
        assert_eq!(deal(PageKind { is_there: true, ..SMALL }, 3), [0, 1, 0], "it takes no room");
        assert_eq!(deal(HUGE, 1), [0], "the last page");
        assert_eq!(deal(HUGE, 4), [1, 0, 1, 0], "none has room: as the kernel finds some");
        assert_eq!(deal(SMALL, 6), [1, 1, 1, 1, 0, 1], "and so on, to the last");
        assert_eq!(deal(SMALL, 3), [0, 1, 0], "none has room");
    }

    /// A bound zone of 16 MiB in two regions, of which so much is populated.
    fn bound(shared: bool, populated: u64) -> (crate::GuestRam, u64) {
        let zone = ZoneSpec { shared, thp: false, ..ZoneSpec::new("a", 16 * MIB) };
        let zones = vec![ZoneSpec { host_numa_node: Some(0), ..zone }];
        let layout = RamLayout {
            hole_start: 8 * MIB,
            hole_end: 32 * MIB,
            end: 1 << 40,
            ..RamLayout::default()
        };
        let ram = crate::GuestRam::new(&crate::RamConfig { zones }, layout).unwrap();
        let mut left = populated;
        for region in ram.regions() {
            let part = left.min(region.len_bytes());
            if part > 0 {
                region.fill(&(0..part)).unwrap();
            }
            left -= part;
        }
        let demands = demands(ram.regions());
        assert!(demands.iter().all(|demand| (demand.class, demand.node) == (0, Some(0))));
        let bytes = demands.iter().map(|demand| demand.bytes).sum();
        (ram, bytes)
    }

    #[test]
    fn bound_memory_that_has_its_pages_takes_no_room_again() {
        for shared in [true, false] {
            for populated in [0, 2 * MIB, 8 * MIB, 12 * MIB, 16 * MIB] {
                let (_ram, bytes) = bound(shared, populated);
                assert_eq!(bytes, 16 * MIB - populated, "shared {shared}: {populated} are there");
            }
        }
        // After a reboot the host's free memory is less by it, and its node's room by nothing more.
        let root = tempfile::tempdir().unwrap();
        let host = topology(root.path());
        for node in [0, 1] {
            let text = format!("Node {node} MemTotal: 65536 kB\nNode {node} MemFree: 20480 kB\n");
            write(root.path(), &format!("sys/devices/system/node/node{node}/meminfo"), &text);
        }
        let room = |populated| {
            let (ram, _) = bound(true, populated);
            let mut homes = Homes::by(&host, &policy(libc::MPOL_DEFAULT, &[]), &ALL);
            homes.look_for_room(&host, &demands(ram.regions()));
            homes.0[0].room[0].free_bytes
        };
        let before = room(0);
        assert_eq!(room(16 * MIB), before + 16 * MIB);
        assert_eq!(room(4 * MIB), before + 4 * MIB);
    }

    #[test]
    fn nodes_of_which_not_all_say_what_is_free_take_turns() {
        let home = |node, room: &[u64]| {
            let room = room.iter().map(|free_bytes| Room::new(0, *free_bytes)).collect();
            Home { node, room }
        };
        let mut dealer = Dealer::new(Homes(vec![home(0, &[2 * GIB]), home(1, &[])]));
        let dealt: Vec<_> = (0..6).map(|_| dealer.deal(SMALL, GIB).unwrap()).collect();
        assert_eq!(dealt, [0, 1, 0, 1, 1, 1]);
    }

    #[test]
    fn the_kernel_says_which_memory_this_process_may_have() {
        let Some(policy) = MemoryPolicy::of_thread() else {
            test_skip::skip!("no NUMA in this kernel");
            return;
        };
        let status = fs::read_to_string("/proc/thread-self/status").unwrap();
        let listed = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"));
        let allowed: Vec<_> = policy.allowed.iter().map(|node| *node as usize).collect();
        assert_eq!(allowed, cpu_list(listed.unwrap()));
        let (host, cpus) = (Host::real(), allowed_cpus());
        let plain = MemoryPolicy { mode: libc::MPOL_DEFAULT, nodes: Vec::new(), ..policy };
        let is_near = |node: &u32| cpus.iter().any(|cpu| host.node_cpus(*node).contains(cpu));
        let near: Vec<_> = plain.allowed.iter().copied().filter(is_near).collect();
        let expected = if near.len() > 1 { near } else { Vec::new() };
        assert_eq!(nodes(&Homes::by(&host, &plain, &cpus)), expected);
    }

    proptest! {
        /// Whatever the nodes have, no node gets more than it has room for as long as another has room, and all the same part.
        #[test]
        fn no_node_is_given_what_another_has_room_for(
            rooms in prop::collection::vec(0..20_u64, 1..5), chunks in 0..100_u64,
        ) {
            let home = |(node, room): (u32, &u64)| Home { node, room: vec![Room::new(0, *room)] };
            let mut dealer = Dealer::new(Homes((0..).zip(&rooms).map(home).collect()));
            let mut given = vec![0_u64; rooms.len()];
            for _ in 0..chunks {
                given[dealer.deal(SMALL, 1).unwrap() as usize] += 1;
            }
            prop_assert_eq!(given.iter().sum::<u64>(), chunks);
            if chunks <= rooms.iter().sum() {
                prop_assert!(given.iter().zip(&rooms).all(|(given, room)| given <= room));
                // Within a chunk for each node.
                let (total, count) = (rooms.iter().sum::<u64>(), rooms.len() as u64);
                let is_due = |(given, room): (&u64, &u64)| (given * total).abs_diff(chunks * room) <= total * count;
                prop_assert!(given.iter().zip(&rooms).all(is_due), "{given:?} of {rooms:?}");
            }
        }
    }
}
