// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Runs in a Debian guest that has two NVMe controllers without a driver: does what one writes by DMA reach
 * the other's memory?
 *
 *   nvme-peer DISK MEMORY     the directories of both functions in /sys/bus/pci/devices; MEMORY has a
 *                             controller memory buffer in BAR 2
 *
 * DISK is driven by its admin queue alone. It writes what it says of itself (Identify Controller) into the
 * guest's memory, and then into the buffer of MEMORY: as it is, while MEMORY's memory decoding is off, with
 * it on again, where the buffer was before it moved, where it moved to, and where it is again. Prints a line
 * for each: "arrives", "does not arrive", or "differs".
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096u
/* A page holds as many, of both kinds. */
#define QUEUE_ENTRIES 8u
#define PATIENCE_S 20

#define PCI_COMMAND 0x04
#define PCI_COMMAND_MEMORY 0x2
#define PCI_COMMAND_MASTER 0x4
#define PCI_BAR2 0x18

/* NVM Express Base Specification 2.0, 3.1.4: registers, in 32-bit words. */
#define REG_CC (0x14 / 4)
#define REG_CSTS (0x1c / 4)
#define REG_AQA (0x24 / 4)
#define REG_ASQ (0x28 / 4)
#define REG_ACQ (0x30 / 4)
#define REG_SQ0_TAIL (0x1000 / 4)
#define REG_CQ0_HEAD (0x1004 / 4)
#define CC_ENABLE 1u
/* Submission entries of 64 bytes, completion entries of 16. */
#define CC_ENTRY_SIZES (6u << 16 | 4u << 20)
#define CSTS_READY 1u
#define IDENTIFY 0x06u
#define IDENTIFY_CONTROLLER 1u
#define SERIAL_OFFSET 4
#define SERIAL_BYTES 20

struct memory {
	volatile uint8_t *at;
	uint64_t gpa;
};

struct disk {
	volatile uint32_t *registers;
	struct memory submissions, completions;
	uint32_t tail, head, phase;
};

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static int open_in(const char *directory, const char *name, int flags)
{
	char path[512];
	int fd;

	snprintf(path, sizeof(path), "%s/%s", directory, name);
	fd = open(path, flags);
	if (fd < 0)
		die(path);
	return fd;
}

static uint64_t read_config(int config, int offset, size_t bytes)
{
	uint64_t value = 0;

	if (pread(config, &value, bytes, offset) != (ssize_t)bytes)
		die("cannot read configuration space");
	return value;
}

static void write_config(int config, int offset, uint64_t value, size_t bytes)
{
	if (pwrite(config, &value, bytes, offset) != (ssize_t)bytes)
		die("cannot write configuration space");
}

/* The whole of a BAR, as the kernel offers it. */
static volatile void *map_bar(const char *directory, const char *name)
{
	int fd = open_in(directory, name, O_RDWR | O_SYNC);
	struct stat stat;
	void *at;

	if (fstat(fd, &stat))
		die("cannot look at a BAR");
	at = mmap(NULL, stat.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (at == MAP_FAILED)
		die("cannot map a BAR");
	close(fd);
	return at;
}

/* A zeroed page that stays where it is, and where that is. */
static struct memory new_page(void)
{
	void *at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_LOCKED, -1, 0);
	int pagemap = open("/proc/self/pagemap", O_RDONLY);
	uint64_t entry;

	if (at == MAP_FAILED || pagemap < 0)
		die("cannot lock a page");
	memset(at, 0, PAGE);
	if (pread(pagemap, &entry, 8, (uintptr_t)at / PAGE * 8) != 8 || !(entry >> 63) || !(entry << 9))
		die("cannot find a page");
	close(pagemap);
	return (struct memory){ at, (entry & ((1ull << 55) - 1)) * PAGE };
}

static int is_late(time_t since)
{
	return time(NULL) - since > PATIENCE_S;
}

static void wait_ready(struct disk *disk, uint32_t ready)
{
	time_t begin = time(NULL);

	while ((disk->registers[REG_CSTS] & CSTS_READY) != ready) {
		if (is_late(begin)) {
			fprintf(stderr, "the controller does not become %s\n", ready ? "ready" : "idle");
			exit(1);
		}
	}
}

static struct disk start(const char *directory)
{
	int config = open_in(directory, "config", O_RDWR);
	struct disk disk = { .phase = 1 };

	write_config(config, PCI_COMMAND,
		     read_config(config, PCI_COMMAND, 2) | PCI_COMMAND_MEMORY | PCI_COMMAND_MASTER, 2);
	close(config);
	disk.registers = map_bar(directory, "resource0");
	disk.submissions = new_page();
	disk.completions = new_page();
	disk.registers[REG_CC] = 0;
	wait_ready(&disk, 0);
	disk.registers[REG_AQA] = (QUEUE_ENTRIES - 1) << 16 | (QUEUE_ENTRIES - 1);
	disk.registers[REG_ASQ] = (uint32_t)disk.submissions.gpa;
	disk.registers[REG_ASQ + 1] = (uint32_t)(disk.submissions.gpa >> 32);
	disk.registers[REG_ACQ] = (uint32_t)disk.completions.gpa;
	disk.registers[REG_ACQ + 1] = (uint32_t)(disk.completions.gpa >> 32);
	disk.registers[REG_CC] = CC_ENTRY_SIZES | CC_ENABLE;
	wait_ready(&disk, CSTS_READY);
	return disk;
}

/* Lets the disk write what it is to an address; its status, zero if it says that it did. */
static unsigned int identify_to(struct disk *disk, uint64_t gpa)
{
	volatile uint32_t *command = (volatile uint32_t *)(disk->submissions.at + disk->tail * 64);
	volatile uint32_t *completion = (volatile uint32_t *)(disk->completions.at + disk->head * 16);
	time_t begin = time(NULL);
	uint32_t status;
	int word;

	for (word = 0; word < 16; word++)
		command[word] = 0;
	command[0] = IDENTIFY;
	command[6] = (uint32_t)gpa;
	command[7] = (uint32_t)(gpa >> 32);
	command[10] = IDENTIFY_CONTROLLER;
	disk->tail = (disk->tail + 1) % QUEUE_ENTRIES;
	__sync_synchronize();
	disk->registers[REG_SQ0_TAIL] = disk->tail;
	do {
		status = completion[3];
		if (is_late(begin)) {
			fprintf(stderr, "the controller does not answer\n");
			exit(1);
		}
	} while ((status >> 16 & 1) != disk->phase);
	disk->head = (disk->head + 1) % QUEUE_ENTRIES;
	if (!disk->head)
		disk->phase ^= 1;
	disk->registers[REG_CQ0_HEAD] = disk->head;
	return status >> 17;
}

static void fill(volatile uint8_t *at, uint8_t value)
{
	size_t word;

	for (word = 0; word < PAGE / 4; word++)
		((volatile uint32_t *)at)[word] = value * 0x01010101u;
}

/* Compares by words, as that is how a BAR is read. */
static int same(volatile uint8_t *left, const uint8_t *right)
{
	size_t word;

	for (word = 0; word < PAGE / 4; word++)
		if (((volatile uint32_t *)left)[word] != ((const uint32_t *)right)[word])
			return 0;
	return 1;
}

static void report(const char *what, volatile uint8_t *found, const uint8_t *expected, unsigned int status)
{
	static uint8_t untouched[PAGE];

	memset(untouched, 0xa5, PAGE);
	printf("%s: %s (status %#x)\n", what,
	       same(found, expected) ? "arrives" : same(found, untouched) ? "does not arrive" : "differs", status);
}

/* Puts the 64-bit BAR 2 somewhere. */
static void place_bar(int config, uint64_t at)
{
	write_config(config, PCI_BAR2 + 4, at >> 32, 4);
	write_config(config, PCI_BAR2, (uint32_t)at, 4);
}

int main(int argc, char **argv)
{
	uint8_t expected[PAGE];
	uint64_t bar, moved;
	volatile uint8_t *buffer;
	struct memory page;
	struct disk disk;
	unsigned int status;
	int config, byte, printable = 0;

	if (argc != 3)
		return 2;
	config = open_in(argv[2], "config", O_RDWR);
	write_config(config, PCI_COMMAND, read_config(config, PCI_COMMAND, 2) | PCI_COMMAND_MEMORY, 2);
	bar = read_config(config, PCI_BAR2, 8) & ~0xfull;
	/* Where nothing else is: BARs are placed from the low end of the window. */
	moved = bar + (1ull << 30);
	buffer = map_bar(argv[2], "resource2");
	disk = start(argv[1]);

	page = new_page();
	status = identify_to(&disk, page.gpa);
	memcpy(expected, (const void *)page.at, PAGE);
	for (byte = 0; byte < SERIAL_BYTES; byte++)
		printable += expected[SERIAL_OFFSET + byte] > ' ';
	printf("guest memory: serial '%.*s', %d letters (status %#x)\n", SERIAL_BYTES,
	       (const char *)expected + SERIAL_OFFSET, printable, status);
	if (status || !printable)
		return 1;

	fill(buffer, 0xa5);
	status = identify_to(&disk, bar);
	report("other device", buffer, expected, status);

	/* What a switched off BAR got is seen when it is on again. */
	fill(buffer, 0xa5);
	write_config(config, PCI_COMMAND, read_config(config, PCI_COMMAND, 2) & ~PCI_COMMAND_MEMORY, 2);
	status = identify_to(&disk, bar);
	write_config(config, PCI_COMMAND, read_config(config, PCI_COMMAND, 2) | PCI_COMMAND_MEMORY, 2);
	report("other device with decoding off", buffer, expected, status);
	status = identify_to(&disk, bar);
	report("other device with decoding on again", buffer, expected, status);

	fill(buffer, 0xa5);
	place_bar(config, moved);
	status = identify_to(&disk, bar);
	place_bar(config, bar);
	report("where it was before it moved", buffer, expected, status);
	place_bar(config, moved);
	status = identify_to(&disk, moved);
	place_bar(config, bar);
	report("where it moved to", buffer, expected, status);
	fill(buffer, 0xa5);
	status = identify_to(&disk, bar);
	report("where it is again", buffer, expected, status);
	return 0;
}
