// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Runs in a Debian guest whose VMM presents KVM as Hyper-V, and does what a Windows kernel does with that: it names
 * itself, and has KVM fill its pages of hypercalls, of time and of messages, with a timer that leaves a message ten
 * times a second. It uses /dev/cpu/N/msr and memory that stays where it is.
 *
 *   hyperv-guest DIRECTORY    sets all up, and then checks it four times a second: what the registers hold, that the page
 *                             of time and the clock's register say the same, that time does not go back, and that the
 *                             timer's messages come. DIRECTORY/state has 'ok ROUNDS MESSAGES', or what is wrong.
 *
 * The timer's interrupt has the vector of KVM's posted interrupts, which Linux counts (PIN in /proc/interrupts) and which
 * does nothing in a guest without guests of its own.
 *
 * Numbers: Hypervisor Top Level Functional Specification, sections 3, 11 and 12.
 */
#include <cpuid.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GUEST_OS_ID 0x40000000
#define HYPERCALL 0x40000001
#define VP_INDEX 0x40000002
#define RESET 0x40000003
#define TIME_REF_COUNT 0x40000020
#define REFERENCE_TSC 0x40000021
#define TSC_FREQUENCY 0x40000022
#define SCONTROL 0x40000080
#define SIEFP 0x40000082
#define SIMP 0x40000083
#define EOM 0x40000084
#define SINT2 0x40000092
#define STIMER0_CONFIG 0x400000b0
#define STIMER0_COUNT 0x400000b1

#define POSTED_INTERRUPT_VECTOR 0xf2
#define SINT 2
/* Enabled, periodic, restarted without being asked; its messages go to source 2. */
#define TIMER (1 | 2 | 8 | SINT << 16)
/* In units of 100 ns. */
#define PERIOD 1000000
#define MESSAGE_TIMER 0x80000010u

enum { HYPERCALLS, TIME, EVENTS, MESSAGES, PAGES };

struct time_page {
	uint32_t sequence, reserved;
	uint64_t scale;
	int64_t offset;
};

static const char *directory;
static int cpu0;

static void state(const char *format, ...)
{
	char path[256], next[256];
	va_list args;
	FILE *file;

	snprintf(next, sizeof(next), "%s/next", directory);
	snprintf(path, sizeof(path), "%s/state", directory);
	file = fopen(next, "w");
	if (!file)
		exit(2);
	va_start(args, format);
	vfprintf(file, format, args);
	va_end(args);
	fputc('\n', file);
	fclose(file);
	rename(next, path);
}

#define FAIL(...)               \
	do {                    \
		state(__VA_ARGS__); \
		exit(1);        \
	} while (0)

static uint64_t get(int cpu, uint32_t msr)
{
	uint64_t value;

	if (pread(cpu, &value, sizeof(value), msr) != sizeof(value))
		FAIL("register %#x cannot be read: %s", msr, strerror(errno));
	return value;
}

static void set(uint32_t msr, uint64_t value)
{
	if (pwrite(cpu0, &value, sizeof(value), msr) != sizeof(value))
		FAIL("register %#x cannot be set: %s", msr, strerror(errno));
}

static int cpu(int number)
{
	char path[64];

	snprintf(path, sizeof(path), "/dev/cpu/%d/msr", number);
	return open(path, O_RDWR);
}

/* The guest physical address of a page that is there. */
static uint64_t address(const void *page)
{
	int file = open("/proc/self/pagemap", O_RDONLY);
	uint64_t entry = 0;

	if (file < 0 || pread(file, &entry, sizeof(entry), (uintptr_t)page / 4096 * 8) != sizeof(entry))
		FAIL("no page map");
	close(file);
	if (!(entry >> 63) || !(entry & ((1ull << 55) - 1)))
		FAIL("a page is not there");
	return (entry & ((1ull << 55) - 1)) * 4096;
}

static uint64_t tsc(void)
{
	uint32_t low, high;

	__asm__ volatile("lfence; rdtsc; lfence" : "=a"(low), "=d"(high));
	return (uint64_t)high << 32 | low;
}

/* The time of the page, or 0 when it says that there is none at the moment. */
static uint64_t page_time(const volatile struct time_page *page)
{
	uint32_t sequence;
	uint64_t time;

	do {
		sequence = page->sequence;
		if (sequence == 0)
			return 0;
		time = (uint64_t)((unsigned __int128)tsc() * page->scale >> 64) + page->offset;
	} while (page->sequence != sequence);
	return time;
}

int main(int argc, char **argv)
{
	uint32_t a, b, c, d, refused = 0;
	uint64_t addresses[PAGES], before, after, time, last = 0, rounds = 0, messages = 0, quiet = 0, reset = 1;
	volatile uint8_t *pages;
	volatile uint32_t *message;
	int page, number, other;

	if (argc != 2)
		return 2;
	directory = argv[1];
	__cpuid(0x40000000, a, b, c, d);
	if (memcmp(&b, "Micr", 4) || memcmp(&c, "osof", 4) || memcmp(&d, "t Hv", 4))
		FAIL("CPUID does not say Hyper-V");
	cpu0 = cpu(0);
	if (cpu0 < 0)
		FAIL("no access to registers: %s", strerror(errno));

	pages = mmap(NULL, PAGES * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_LOCKED | MAP_POPULATE, -1, 0);
	if (pages == MAP_FAILED)
		FAIL("no memory");
	memset((void *)pages, 0, PAGES * 4096);
	for (page = 0; page < PAGES; page++)
		addresses[page] = address((void *)(pages + page * 4096));

	/* A register that the CPUID does not promise: to write it would reset the machine. */
	if (pwrite(cpu0, &reset, sizeof(reset), RESET) != sizeof(reset))
		refused = 1;
	if (!refused)
		FAIL("a register that was not promised takes a value");

	/* As an open-source guest that has no version to tell. */
	set(GUEST_OS_ID, 1ull << 63 | 0x1234);
	set(HYPERCALL, addresses[HYPERCALLS] | 1);
	set(REFERENCE_TSC, addresses[TIME] | 1);
	set(SIEFP, addresses[EVENTS] | 1);
	set(SIMP, addresses[MESSAGES] | 1);
	set(SINT2, POSTED_INTERRUPT_VECTOR);
	set(SCONTROL, 1);
	set(STIMER0_COUNT, PERIOD);
	set(STIMER0_CONFIG, TIMER);

	message = (volatile uint32_t *)(pages + MESSAGES * 4096 + SINT * 256);
	for (;;) {
		const struct {
			uint32_t msr;
			uint64_t value;
		} held[] = {
			{ GUEST_OS_ID, 1ull << 63 | 0x1234 },
			{ HYPERCALL, addresses[HYPERCALLS] | 1 },
			{ REFERENCE_TSC, addresses[TIME] | 1 },
			{ SIEFP, addresses[EVENTS] | 1 },
			{ SIMP, addresses[MESSAGES] | 1 },
			{ SINT2, POSTED_INTERRUPT_VECTOR },
			{ SCONTROL, 1 },
			{ STIMER0_COUNT, PERIOD },
			{ STIMER0_CONFIG, TIMER },
		};
		for (number = 0; number < (int)(sizeof(held) / sizeof(held[0])); number++)
			if (get(cpu0, held[number].msr) != held[number].value)
				FAIL("register %#x is %#llx where %#llx was set", held[number].msr,
				     (unsigned long long)get(cpu0, held[number].msr), (unsigned long long)held[number].value);
		for (number = 0; (other = cpu(number)) >= 0; number++) {
			if (get(other, VP_INDEX) != (uint64_t)number)
				FAIL("vCPU %d has index %llu", number, (unsigned long long)get(other, VP_INDEX));
			close(other);
		}
		for (page = 0; page < PAGES; page++)
			if (address((void *)(pages + page * 4096)) != addresses[page])
				FAIL("the guest's kernel has moved a page: nothing is shown");
		/* vmcall or vmmcall. */
		for (number = 0; number < 64; number++)
			if (pages[number] == 0x0f && pages[number + 1] == 0x01 &&
			    (pages[number + 2] == 0xc1 || pages[number + 2] == 0xd9))
				break;
		if (number == 64)
			FAIL("the page of hypercalls has none");
		if (get(cpu0, TSC_FREQUENCY) < 100000000)
			FAIL("no frequency of the TSC");

		before = get(cpu0, TIME_REF_COUNT);
		time = page_time((void *)(pages + TIME * 4096));
		after = get(cpu0, TIME_REF_COUNT);
		if (before < last)
			FAIL("time went back from %llu to %llu", (unsigned long long)last, (unsigned long long)before);
		if (time && (time + 10 < before || time > after + 10))
			FAIL("the page of time says %llu between %llu and %llu", (unsigned long long)time,
			     (unsigned long long)before, (unsigned long long)after);
		last = after;

		if (*message == MESSAGE_TIMER) {
			messages++;
			quiet = 0;
			*message = 0;
			set(EOM, 0);
		} else if (*message) {
			FAIL("message %#x", *message);
		} else if (++quiet > 40) {
			FAIL("no message of the timer for ten seconds, after %llu", (unsigned long long)messages);
		}
		state("ok %llu %llu %s", (unsigned long long)++rounds, (unsigned long long)messages, time ? "page" : "register");
		usleep(250000);
	}
}
