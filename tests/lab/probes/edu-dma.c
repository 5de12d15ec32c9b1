// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Runs in a Debian guest that has QEMU's "edu" device without a driver: does its DMA reach the pages that
 * the guest has?
 *
 *   edu-dma DEVICE      its directory in /sys/bus/pci/devices; obeys lines of the standard input
 *
 *   fill                the device writes a stamp into each page
 *   zero                the processor zeroes the odd pages
 *   check               the device reads all pages and finds what the processor finds: a stamp, or zeros; then
 *                       it writes new stamps, which the processor finds, and the processor others, which it finds
 *   quit
 *
 * Each line is answered by one that ends in "done", "wrong" (after a line for each page that is), or
 * "failed". The device has a buffer of one page, which a guest that has moved finds anew; no line leaves
 * anything in it for the next.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096u
/* Each transfer takes the device 100 ms. */
#define PAGES 24u
/* Where in its page a stamp is: neither at the begin nor at the end. */
#define STAMP_OFFSET 2048u
#define PATIENCE_S 30

#define PCI_COMMAND 0x04
#define PCI_COMMAND_MEMORY 0x2
#define PCI_COMMAND_MASTER 0x4

/* docs/specs/edu.rst of QEMU, in 64-bit words. */
#define REG_BYTES 4096u
#define REG_DMA_SOURCE (0x80 / 8)
#define REG_DMA_TARGET (0x88 / 8)
#define REG_DMA_COUNT (0x90 / 8)
#define REG_DMA_COMMAND (0x98 / 8)
#define DMA_RUNS 1u
#define DMA_TO_MEMORY 2u
#define BUFFER 0x40000u

static volatile uint64_t *registers;
static volatile uint8_t *memory;
static uint64_t gpas[PAGES + 1];
/* One more page, for what goes through the device's buffer as a whole. */
#define SCRATCH PAGES
/* What each page holds. */
static uint64_t stamps[PAGES];
static uint64_t rounds;

static void die(const char *what)
{
	perror(what);
	printf("failed\n");
	exit(1);
}

static uint64_t gpa_of(volatile void *at)
{
	uint64_t entry = 0;
	off_t place = (uintptr_t)at / PAGE * sizeof(entry);
	int map = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);

	if (map < 0 || pread(map, &entry, sizeof(entry), place) != sizeof(entry))
		die("pagemap");
	close(map);
	if (!(entry >> 63) || !(entry & ((1ull << 55) - 1)))
		die("a page without an address");
	return (entry & ((1ull << 55) - 1)) * PAGE;
}

static volatile uint64_t *stamp_at(unsigned page)
{
	return (volatile uint64_t *)(memory + page * PAGE + STAMP_OFFSET);
}

static bool transfer(uint64_t source, uint64_t target, uint64_t count, uint64_t command)
{
	time_t end = time(NULL) + PATIENCE_S;

	registers[REG_DMA_SOURCE] = source;
	registers[REG_DMA_TARGET] = target;
	registers[REG_DMA_COUNT] = count;
	registers[REG_DMA_COMMAND] = command | DMA_RUNS;
	while (registers[REG_DMA_COMMAND] & DMA_RUNS) {
		if (time(NULL) > end) {
			printf("a transfer does not end\n");
			return false;
		}
		usleep(1000);
	}
	return true;
}

static bool to_device(uint64_t gpa, uint64_t offset, uint64_t count)
{
	return transfer(gpa, BUFFER + offset, count, 0);
}

static bool to_memory(uint64_t gpa, uint64_t offset, uint64_t count)
{
	return transfer(BUFFER + offset, gpa, count, DMA_TO_MEMORY);
}

/* The pages are where they were: the kernel has not moved them, whatever the host did. */
static bool pages_stay(void)
{
	for (unsigned page = 0; page <= PAGES; page++)
		if (gpa_of(memory + page * PAGE) != gpas[page]) {
			printf("the guest's kernel has moved page %u\n", page);
			return false;
		}
	return true;
}

static uint64_t new_stamp(unsigned page)
{
	return 0xed00000000000000u | rounds << 16 | (page + 1);
}

/* The device writes new stamps. */
static bool fill(void)
{
	volatile uint64_t *scratch = (volatile uint64_t *)(memory + SCRATCH * PAGE);

	rounds++;
	for (unsigned page = 0; page < PAGES; page++)
		scratch[page] = stamps[page] = new_stamp(page);
	if (!to_device(gpas[SCRATCH], 0, PAGES * 8))
		return false;
	for (unsigned page = 0; page < PAGES; page++)
		if (!to_memory(gpas[page] + STAMP_OFFSET, page * 8, 8))
			return false;
	return true;
}

/* Pages in which the processor does not find what should be there. */
static unsigned looks_wrong(const char *after)
{
	unsigned wrong = 0;

	for (unsigned page = 0; page < PAGES; page++)
		if (*stamp_at(page) != stamps[page]) {
			printf("page %u: %s the processor finds %llx in place of %llx\n", page, after,
			       (unsigned long long)*stamp_at(page), (unsigned long long)stamps[page]);
			wrong++;
		}
	return wrong;
}

/* Pages in which the device does not find what should be there, or too many. */
static unsigned reads_wrong(const char *after)
{
	volatile uint64_t *scratch = (volatile uint64_t *)(memory + SCRATCH * PAGE);
	unsigned wrong = 0;

	memset((void *)scratch, 0xff, PAGE);
	for (unsigned page = 0; page < PAGES; page++)
		if (!to_device(gpas[page] + STAMP_OFFSET, page * 8, 8))
			return PAGES;
	if (!to_memory(gpas[SCRATCH], 0, PAGES * 8))
		return PAGES;
	for (unsigned page = 0; page < PAGES; page++)
		if (scratch[page] != stamps[page]) {
			printf("page %u: %s the device reads %llx in place of %llx\n", page, after,
			       (unsigned long long)scratch[page], (unsigned long long)stamps[page]);
			wrong++;
		}
	return wrong;
}

static bool check(void)
{
	unsigned wrong;

	if (!pages_stay())
		return false;
	wrong = looks_wrong("first");
	wrong += reads_wrong("first");
	if (!fill())
		return false;
	wrong += looks_wrong("after DMA");
	rounds++;
	for (unsigned page = 0; page < PAGES; page++)
		*stamp_at(page) = stamps[page] = new_stamp(page);
	wrong += reads_wrong("after a write");
	return !wrong;
}

static bool zero(void)
{
	for (unsigned page = 1; page < PAGES; page += 2) {
		memset((void *)(memory + page * PAGE), 0, PAGE);
		stamps[page] = 0;
	}
	return true;
}

static void enable(const char *device)
{
	char path[256];
	uint16_t command;
	int file;

	snprintf(path, sizeof(path), "%s/config", device);
	file = open(path, O_RDWR | O_CLOEXEC);
	if (file < 0 || pread(file, &command, sizeof(command), PCI_COMMAND) != sizeof(command))
		die(path);
	command |= PCI_COMMAND_MEMORY | PCI_COMMAND_MASTER;
	if (pwrite(file, &command, sizeof(command), PCI_COMMAND) != sizeof(command))
		die(path);
	close(file);
	snprintf(path, sizeof(path), "%s/resource0", device);
	file = open(path, O_RDWR | O_SYNC | O_CLOEXEC);
	registers = mmap(NULL, REG_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (file < 0 || registers == MAP_FAILED)
		die(path);
}

int main(int count, char **words)
{
	size_t bytes = (PAGES + 1) * PAGE;
	char line[64];

	if (count != 2)
		return 2;
	setvbuf(stdout, NULL, _IOLBF, 0);
	enable(words[1]);
	memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED || madvise((void *)memory, bytes, MADV_NOHUGEPAGE) || mlock((void *)memory, bytes))
		die("memory");
	for (unsigned page = 0; page <= PAGES; page++) {
		/* A page of its own, and not the kernel's page of zeros. */
		memory[page * PAGE] = 1;
		memory[page * PAGE] = 0;
		gpas[page] = gpa_of(memory + page * PAGE);
	}
	printf("done\n");
	while (fgets(line, sizeof(line), stdin)) {
		bool good;

		if (!strcmp(line, "fill\n"))
			good = fill();
		else if (!strcmp(line, "zero\n"))
			good = zero();
		else if (!strcmp(line, "check\n"))
			good = check();
		else if (!strcmp(line, "quit\n"))
			return 0;
		else
			continue;
		printf("%s\n", good ? "done" : "wrong");
	}
	return 0;
}
