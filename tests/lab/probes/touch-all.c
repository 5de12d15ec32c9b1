// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Runs in a Debian guest: has memory, and writes one word to each of its pages when told to.
 *
 *   touch-all MIB DIRECTORY       fills the memory, makes DIRECTORY/ready, and then for each file
 *                                 DIRECTORY/go that appears: removes it, writes to each page once, checks
 *                                 that the page holds what it did, and leaves the microseconds that this
 *                                 took in DIRECTORY/took
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define WORDS (4096 / sizeof(uint64_t))

static uint64_t now_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000ull + now.tv_nsec / 1000;
}

int main(int argc, char **argv)
{
	char ready[256], go[256], took[256], part[256];
	uint64_t pages, page, round = 0;
	volatile uint64_t *memory;
	FILE *file;

	if (argc != 3)
		return 2;
	pages = strtoull(argv[1], NULL, 10) * 256;
	snprintf(ready, sizeof(ready), "%s/ready", argv[2]);
	snprintf(go, sizeof(go), "%s/go", argv[2]);
	snprintf(took, sizeof(took), "%s/took", argv[2]);
	snprintf(part, sizeof(part), "%s/took.part", argv[2]);
	memory = mmap(NULL, pages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED || mlock((void *)memory, pages * 4096))
		return 1;
	for (page = 0; page < pages; page++)
		memory[page * WORDS] = page + 1;
	file = fopen(ready, "w");
	if (!file || fclose(file))
		return 1;
	for (;; round++) {
		uint64_t begin, wrong = 0;

		while (access(go, F_OK))
			usleep(10000);
		unlink(go);
		begin = now_us();
		for (page = 0; page < pages; page++) {
			wrong += memory[page * WORDS] != page + 1 + round;
			memory[page * WORDS] = page + 2 + round;
		}
		begin = now_us() - begin;
		file = fopen(part, "w");
		if (!file)
			return 1;
		fprintf(file, "%llu %llu\n", (unsigned long long)begin, (unsigned long long)wrong);
		if (fclose(file) || rename(part, took))
			return 1;
	}
}
