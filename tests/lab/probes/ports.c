// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Runs in a Debian guest: reads and writes single ports, in the order of its arguments.
 *
 *   ports BASE ACCESS...    BASE in hexadecimal digits; an ACCESS is rN, which reads port BASE+N, or wN=XX, which
 *                           writes the byte XX there
 *
 * Prints what was read, in hexadecimal digits, on one line. By /dev/port: the emulated processor of the lab
 * refuses a program its ports (ioperm, iopl) in a guest that has moved.
 */
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	unsigned base, offset, value;
	unsigned char byte;
	char end;
	int ports;

	if (argc < 3 || sscanf(argv[1], "%x%c", &base, &end) != 1 || base > 0xffff) {
		fprintf(stderr, "usage: ports BASE rN|wN=XX...\n");
		return 2;
	}
	ports = open("/dev/port", O_RDWR);
	if (ports < 0) {
		perror("/dev/port");
		return 1;
	}
	for (int at = 2; at < argc; at++) {
		if (sscanf(argv[at], "w%x=%x%c", &offset, &value, &end) == 2 && value <= 0xff) {
			byte = value;
			if (pwrite(ports, &byte, 1, base + offset) != 1) {
				perror(argv[at]);
				return 1;
			}
		} else if (sscanf(argv[at], "r%x%c", &offset, &end) == 1) {
			if (pread(ports, &byte, 1, base + offset) != 1) {
				perror(argv[at]);
				return 1;
			}
			printf("%02x ", byte);
		} else {
			fprintf(stderr, "ports: what is '%s'?\n", argv[at]);
			return 2;
		}
	}
	printf("\n");
	return 0;
}
