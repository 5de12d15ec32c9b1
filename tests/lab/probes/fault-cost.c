// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * What a fault of a vCPU on a missing page costs, and whether KVM has userfault exits at all.
 *
 *   fault-cost handshake          asks /dev/kvm; exit code 0 with the interface, 3 without
 *   fault-cost MODE VCPUS MIB [allocated|filled] [prefault]
 *                                 one guest whose vCPUs write to each of their pages once; with "allocated"
 *                                 the memfd has its pages before the guest starts, only their contents are
 *                                 missing, so that allocating and clearing them is not part of the fault;
 *                                 with "filled" nothing is copied either, which leaves the fault alone; with
 *                                 "prefault" a vCPU's thread has KVM map its page before it goes on
 *       none     memory is there, no fault handling
 *       uffd     userfaultfd, one thread that reads events and installs pages
 *       sigbus   userfaultfd refuses; the vCPU's thread takes the address from the exit
 *       exit     KVM_MEM_USERFAULT: the vCPU's thread installs the page and clears the bit
 *       copy     no guest: what writing the contents of a page costs
 *   fault-cost refused SECONDS [nohlt]
 *                                 a refused fault with interrupts enabled and an interrupt controller in
 *                                 KVM: exit code 0 if KVM_RUN says so, 4 if it does not come back; with
 *                                 "nohlt" HLT does not exit, which keeps KVM from asynchronous page faults
 *
 * Guest memory is a memfd with two mappings, as in the VMM: content is written through the one that
 * KVM does not know. Times of an emulated machine mean something as ratios within one run only.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* The interface of docs/fault-exits.md, repeated here so that this builds with any kernel's headers. */
#define ASK 0x4b564d5546615331ull
#define ANSWER 0x31416e5355464d6bull
struct userfault_info {
	uint64_t magic, nonce;
	uint32_t version, min_version;
	uint64_t features;
	uint32_t slot_flag, cap;
	uint64_t exit_flag, pad[2];
};
#define GET_USERFAULT_INFO _IOWR(KVMIO, 0xfe, struct userfault_info)
struct region2 {
	uint32_t slot, flags;
	uint64_t gpa, size, hva, memfd_offset;
	uint32_t memfd, pad1;
	uint64_t userfault_bitmap, pad2[13];
};
#define SET_REGION2 _IOW(KVMIO, 0x49, struct region2)
#define EXIT_MEMORY_FAULT 39

struct pre_fault {
	uint64_t gpa, size, flags, padding[5];
};
#define PRE_FAULT_MEMORY _IOWR(KVMIO, 0xd5, struct pre_fault)

enum mode { NONE, UFFD, SIGBUS_EXIT, USERFAULT, COPY };

#define PAGE 4096ul
#define FIRST (2ul << 20) /* the vCPUs' pages; code and page tables are below */
#define DONE_GPA 0xe0000000ul

static enum mode mode;
static int kvm, vm, uffd = -1, nr_vcpus = 1, allocated, filled, prefault;
static uint64_t size;
static uint8_t *slot_map, *alias_map;
static uint64_t *bitmap;
static struct userfault_info info;
static char content[PAGE] __attribute__((aligned(4096)));
static pthread_barrier_t barrier;
static double seconds[64];

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static int handshake(void)
{
	uint64_t nonce = (uint64_t)getpid() << 32 ^ time(NULL);

	memset(&info, 0, sizeof(info));
	info.magic = ASK;
	info.nonce = nonce;
	return !ioctl(kvm, GET_USERFAULT_INFO, &info) && info.magic == (ANSWER ^ nonce) &&
	       info.min_version <= 1 && info.version >= 1;
}

static void set_slot(uint32_t flags)
{
	struct region2 region = { .flags = flags, .size = size, .hva = (uintptr_t)slot_map,
				  .userfault_bitmap = (uintptr_t)bitmap };

	if (ioctl(vm, SET_REGION2, &region))
		die("KVM_SET_USER_MEMORY_REGION2");
}

/* The page arrives through the alias and is made visible in the way of the mode. */
static void install(uint64_t gpa)
{
	uint64_t page = gpa / PAGE;

	if (!filled)
		memcpy(alias_map + page * PAGE, content, PAGE);
	if (mode == COPY) {
		return;
	} else if (mode == USERFAULT) {
		__atomic_fetch_and(&bitmap[page / 64], ~(1ull << page % 64), __ATOMIC_RELEASE);
	} else {
		struct uffdio_continue c = { .range = { (uintptr_t)slot_map + page * PAGE, PAGE } };

		if (ioctl(uffd, UFFDIO_CONTINUE, &c) && errno != EEXIST)
			die("UFFDIO_CONTINUE");
	}
}

static void *uffd_thread(void *arg)
{
	struct uffd_msg events[16];

	for (;;) {
		ssize_t i, n = read(uffd, events, sizeof(events));

		for (i = 0; i < n / (ssize_t)sizeof(events[0]); i++)
			install((events[i].arg.pagefault.address & ~(PAGE - 1)) - (uintptr_t)slot_map);
	}
	return arg;
}

static void open_uffd(uint64_t features)
{
	struct uffdio_api api = { .api = UFFD_API, .features = features | UFFD_FEATURE_MINOR_SHMEM };
	struct uffdio_register reg = {
		.range = { (uintptr_t)slot_map + FIRST, size - FIRST },
		.mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_MINOR,
	};

	uffd = syscall(__NR_userfaultfd, O_CLOEXEC);
	if (uffd < 0 || ioctl(uffd, UFFDIO_API, &api) || ioctl(uffd, UFFDIO_REGISTER, &reg))
		die("userfaultfd");
}

/* Identity page tables with 2 MiB pages for 4 GiB, and a loop that writes to a page at a time. */
static void load_guest(int enable_interrupts)
{
	static const uint8_t loop[] = {
		0x48, 0x89, 0x0f,                         /* mov %rcx, (%rdi) */
		0x48, 0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, /* add $4096, %rdi */
		0x48, 0xff, 0xc9,                         /* dec %rcx */
		0x75, 0xf1,                               /* jnz */
		0xa1, 0x00, 0x00, 0x00, 0xe0, 0, 0, 0, 0, /* mov DONE_GPA, %eax */
		0xf4,
	};
	uint64_t *pml4 = (void *)(alias_map + 0x2000), *pdpt = (void *)(alias_map + 0x3000);
	int i, j;

	pml4[0] = 0x3000 | 7;
	for (i = 0; i < 4; i++) {
		uint64_t *pd = (void *)(alias_map + 0x4000 + i * PAGE);

		pdpt[i] = (0x4000 + i * PAGE) | 7;
		for (j = 0; j < 512; j++)
			pd[j] = (uint64_t)(i * 512 + j) << 21 | 0xe7;
	}
	/* After sti, interrupts stay off for one more instruction. */
	alias_map[0x1000] = enable_interrupts ? 0xfb : 0x90; /* sti or nop */
	alias_map[0x1001] = 0x90;
	memcpy(alias_map + 0x1002, loop, sizeof(loop));
}

static void setup_vcpu(int vcpu, uint64_t first, uint64_t pages)
{
	struct {
		struct kvm_cpuid2 head;
		struct kvm_cpuid_entry2 entries[256];
	} cpuid = { .head.nent = 256 };
	struct kvm_regs regs = { .rflags = 2, .rip = 0x1000, .rsp = 0x8000, .rdi = first, .rcx = pages };
	struct kvm_segment code = { .limit = ~0u, .selector = 0x10, .type = 11, .present = 1, .s = 1, .g = 1, .l = 1 };
	struct kvm_segment data = { .limit = ~0u, .selector = 0x18, .type = 3, .present = 1, .s = 1, .g = 1, .db = 1 };
	struct kvm_mp_state runnable = { 0 };
	struct kvm_sregs sregs;

	if (ioctl(kvm, KVM_GET_SUPPORTED_CPUID, &cpuid) || ioctl(vcpu, KVM_SET_CPUID2, &cpuid))
		die("cpuid");
	if (ioctl(vcpu, KVM_GET_SREGS, &sregs))
		die("KVM_GET_SREGS");
	sregs.cs = code;
	sregs.ss = sregs.ds = sregs.es = sregs.fs = sregs.gs = data;
	sregs.cr3 = 0x2000;
	sregs.cr4 |= 0x620;
	sregs.cr0 = 0x80050033;
	sregs.efer |= 0x500;
	if (ioctl(vcpu, KVM_SET_SREGS, &sregs) || ioctl(vcpu, KVM_SET_REGS, &regs))
		die("registers");
	ioctl(vcpu, KVM_SET_MP_STATE, &runnable);
}

static void *vcpu_thread(void *arg)
{
	long id = (long)arg;
	uint64_t pages = (size - FIRST) / PAGE / nr_vcpus;
	int vcpu = ioctl(vm, KVM_CREATE_VCPU, id);
	struct kvm_run *run = mmap(NULL, ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
	struct { uint64_t flags, gpa, size; } *fault = (void *)&run->hw;
	double start;

	if (vcpu < 0 || run == MAP_FAILED)
		die("vcpu");
	setup_vcpu(vcpu, FIRST + id * pages * PAGE, pages);
	pthread_barrier_wait(&barrier);
	start = now();
	for (;;) {
		if (!ioctl(vcpu, KVM_RUN, 0)) {
			if (run->exit_reason == KVM_EXIT_MMIO && run->mmio.phys_addr == DONE_GPA)
				break;
			fprintf(stderr, "unexpected exit %d\n", run->exit_reason);
			exit(1);
		}
		if (errno == EINTR || errno == EAGAIN)
			continue;
		if (errno != EFAULT || run->exit_reason != EXIT_MEMORY_FAULT)
			die("KVM_RUN");
		if (!!(fault->flags & (1 << 4)) != (mode == USERFAULT)) {
			fprintf(stderr, "fault with flags %#lx\n", fault->flags);
			exit(1);
		}
		install(fault->gpa);
		if (prefault) {
			struct pre_fault page = { .gpa = fault->gpa & ~(PAGE - 1), .size = PAGE };

			if (ioctl(vcpu, PRE_FAULT_MEMORY, &page))
				die("KVM_PRE_FAULT_MEMORY");
		}
	}
	seconds[id] = now() - start;
	return NULL;
}

static void create_vm(uint64_t bytes)
{
	int memfd = memfd_create("guest", MFD_CLOEXEC);

	size = bytes;
	vm = ioctl(kvm, KVM_CREATE_VM, 0);
	if (vm < 0 || memfd < 0 || ftruncate(memfd, size))
		die("vm");
	slot_map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
	alias_map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
	bitmap = calloc(size / PAGE / 64 + 1, 8);
	if (slot_map == MAP_FAILED || alias_map == MAP_FAILED || !bitmap)
		die("memory");
	ioctl(vm, KVM_SET_TSS_ADDR, 0xfffbd000ul);
}

static int measure(uint64_t mib)
{
	pthread_t threads[64], handler;
	double longest = 0;
	long i;

	create_vm(mib << 20);
	load_guest(0);
	if (mode == NONE || allocated || filled)
		memset(alias_map + FIRST, mode == NONE || filled, size - FIRST);
	if (mode == COPY) {
		double start = now();

		for (i = FIRST; i < (long)size; i += PAGE)
			install(i);
		printf("%.3f us per page\n", (now() - start) * 1e6 / ((size - FIRST) / PAGE));
		return 0;
	}
	if (mode == UFFD || mode == SIGBUS_EXIT)
		open_uffd(mode == UFFD ? 0 : UFFD_FEATURE_SIGBUS);
	if (mode == UFFD)
		pthread_create(&handler, NULL, uffd_thread, NULL);
	if (mode == USERFAULT)
		for (i = FIRST / PAGE; i < (long)(size / PAGE); i++)
			bitmap[i / 64] |= 1ull << i % 64;
	set_slot(mode == USERFAULT ? info.slot_flag : 0);
	pthread_barrier_init(&barrier, NULL, nr_vcpus);
	for (i = 0; i < nr_vcpus; i++)
		pthread_create(&threads[i], NULL, vcpu_thread, (void *)i);
	for (i = 0; i < nr_vcpus; i++) {
		pthread_join(threads[i], NULL);
		if (seconds[i] > longest)
			longest = seconds[i];
	}
	/* Every page must have been written by the guest. */
	for (i = FIRST / PAGE; i < (long)(FIRST / PAGE + (size - FIRST) / PAGE / nr_vcpus * nr_vcpus); i++)
		if (!*(uint32_t *)(alias_map + i * PAGE)) {
			fprintf(stderr, "page %ld was not written\n", i);
			return 1;
		}
	printf("%.3f us per page and vCPU\n", longest * 1e6 / ((size - FIRST) / PAGE / nr_vcpus));
	return 0;
}

static void on_alarm(int signal)
{
	static const char text[] = "KVM_RUN did not come back from a refused fault\n";

	(void)!write(1, text, sizeof(text) - 1);
	_exit(4 + 0 * signal);
}

static int refused(unsigned int limit_s, int nohlt)
{
	struct kvm_enable_cap cap = { .cap = KVM_CAP_X86_DISABLE_EXITS, .args = { KVM_X86_DISABLE_EXITS_HLT } };
	struct kvm_run *run;
	int vcpu, r;

	create_vm(16 << 20);
	load_guest(1);
	mode = SIGBUS_EXIT;
	open_uffd(UFFD_FEATURE_SIGBUS);
	if (ioctl(vm, KVM_CREATE_IRQCHIP, 0))
		die("KVM_CREATE_IRQCHIP");
	if (nohlt && ioctl(vm, KVM_ENABLE_CAP, &cap))
		die("KVM_CAP_X86_DISABLE_EXITS");
	set_slot(0);
	vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
	run = mmap(NULL, ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
	if (vcpu < 0 || run == MAP_FAILED)
		die("vcpu");
	setup_vcpu(vcpu, FIRST, 1);
	signal(SIGALRM, on_alarm);
	alarm(limit_s);
	r = ioctl(vcpu, KVM_RUN, 0);
	printf("KVM_RUN %d, errno %s, exit %d\n", r, strerror(errno), run->exit_reason);
	return r == -1 && errno == EFAULT ? 0 : 1;
}

int main(int argc, char **argv)
{
	static const char *const names[] = { "none", "uffd", "sigbus", "exit", "copy" };
	int have, i;

	kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
	if (kvm < 0)
		die("/dev/kvm");
	have = handshake();
	if (argc == 2 && !strcmp(argv[1], "handshake")) {
		if (!have) {
			puts("no userfault exits");
			return 3;
		}
		printf("userfault exits, versions %u to %u, features %#lx\n", info.min_version, info.version, info.features);
		return 0;
	}
	if (argc >= 3 && !strcmp(argv[1], "refused"))
		return refused(atoi(argv[2]), argc == 4);
	for (i = 4; i < argc; i++) {
		allocated |= !strcmp(argv[i], "allocated");
		filled |= !strcmp(argv[i], "filled");
		prefault |= !strcmp(argv[i], "prefault");
	}
	for (i = 0; argc >= 4 && argc == 4 + allocated + filled + prefault && i < 5; i++) {
		if (strcmp(argv[1], names[i]))
			continue;
		mode = i;
		nr_vcpus = atoi(argv[2]);
		if (nr_vcpus < 1 || nr_vcpus > 64 || atoi(argv[3]) < 4 || ((mode == SIGBUS_EXIT || mode == USERFAULT) && !have)) {
			fputs("not possible here\n", stderr);
			return 3;
		}
		memset(content, 1, sizeof(content));
		return measure(atoi(argv[3]));
	}
	fputs("fault-cost handshake | refused SECONDS | none|uffd|sigbus|exit|copy VCPUS MIB [allocated|filled] [prefault]\n", stderr);
	return 2;
}
