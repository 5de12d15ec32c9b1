// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A library to load before others (LD_PRELOAD): opening a device through VFIO takes as many seconds more as
 * SLOW_OPEN_S says, and fails then if SLOW_OPEN_FAILS is set; resetting one that is open takes as many more as
 * SLOW_RESET_S says, and no memory is mapped before SLOW_MAP_S seconds after the first attempt.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/vfio.h>
#include <stdarg.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* Linux 6.6 and newer; the headers may be older. VFIO_DEVICE_BIND_IOMMUFD. */
#define BIND_IOMMUFD _IO(VFIO_TYPE, VFIO_BASE + 18)
/* IOMMU_IOAS_MAP, and IOMMU_IOAS_MAP_FILE of Linux 6.14 and newer. */
#define IOAS_MAP _IO(';', 0x85)
#define IOAS_MAP_FILE _IO(';', 0x8f)

static void sleep_for(const char *seconds)
{
	sleep(seconds ? (unsigned)atoi(seconds) : 0);
}

int ioctl(int fd, unsigned long request, ...)
{
	int (*real)(int, unsigned long, void *) = (int (*)(int, unsigned long, void *))dlsym(RTLD_NEXT, "ioctl");
	va_list list;
	void *argument;

	va_start(list, request);
	argument = va_arg(list, void *);
	va_end(list);
	if (request == VFIO_IOMMU_MAP_DMA || request == IOAS_MAP || request == IOAS_MAP_FILE) {
		const char *seconds = getenv("SLOW_MAP_S");
		static time_t first;
		time_t none = 0, now = time(NULL), left;

		__atomic_compare_exchange_n(&first, &none, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
		left = __atomic_load_n(&first, __ATOMIC_RELAXED) + (seconds ? atoi(seconds) : 0) - now;
		if (left > 0)
			sleep((unsigned)left);
	}
	if (request == VFIO_DEVICE_RESET)
		sleep_for(getenv("SLOW_RESET_S"));
	if (request == VFIO_GROUP_GET_DEVICE_FD || request == BIND_IOMMUFD) {
		sleep_for(getenv("SLOW_OPEN_S"));
		if (getenv("SLOW_OPEN_FAILS")) {
			errno = EIO;
			return -1;
		}
	}
	return real(fd, request, argument);
}
