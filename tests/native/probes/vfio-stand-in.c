// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A library to load before others (LD_PRELOAD): VFIO of type 1 where the host has none. Each device is a function with a
 * 16 KiB BAR and no interrupts, which does nothing. Memory counts as mapped when that is asked for. Of iommufd there is as
 * much as a VM needs whose devices are never open.
 *
 * If the folder VFIO_STAND_IN has a pipe by a device's name (NAME.pipe), opening the device waits for a byte from it: 'o'
 * opens it, any other has it fail. NAME.taken grows by one byte for each that was taken.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <linux/vfio.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define NAME "vfio-stand-in"
#define DEVICES "/dev/vfio/devices/"
#define REGION_BITS 40
#define BAR_BYTES 0x4000
#define CONFIG_BYTES 256

/* Not all hosts have linux/iommufd.h. */
#define IOMMU_DESTROY _IO(VFIO_TYPE, 0x80)
#define IOMMU_IOAS_ALLOC _IO(VFIO_TYPE, 0x81)
struct iommu_ioas_alloc {
	uint32_t size, flags, out_ioas_id;
};

static int made(void)
{
	return memfd_create(NAME, MFD_CLOEXEC);
}

/* Whether a descriptor is one of ours. */
static int is_ours(int fd)
{
	char link[64], target[64];
	ssize_t len;

	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	len = readlink(link, target, sizeof target - 1);
	if (len < 0)
		return 0;
	target[len] = 0;
	return strstr(target, "memfd:" NAME) != NULL;
}

static int refused(int error)
{
	errno = error;
	return -1;
}

/* Whether the device may be opened, once that is known. */
static int may_open(const char *name)
{
	const char *folder = getenv("VFIO_STAND_IN");
	char path[4096], answer = 0;
	ssize_t len;
	int file;

	snprintf(path, sizeof path, "%s/%s.pipe", folder ? folder : "", name);
	/* For writing too: else the writer of an earlier byte ends the wait when it closes the pipe. */
	file = open(path, O_RDWR | O_CLOEXEC);
	if (file < 0)
		return errno == ENOENT;
	len = read(file, &answer, 1);
	close(file);
	snprintf(path, sizeof path, "%s/%s.taken", folder ? folder : "", name);
	file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	if (len != 1 || file < 0 || write(file, &answer, 1) != 1)
		answer = 0;
	close(file);
	return answer == 'o';
}

static int open_device(const char *name)
{
	/* Vendor, device, command and status, class; a BAR of 32 bits. */
	static const uint8_t config[CONFIG_BYTES] = {0x36, 0x1b, 0x10, 0x00, 0, 0, 0, 0, 2, 0, 0, 0xff};
	int fd;

	if (!may_open(name))
		return refused(EIO);
	fd = made();
	if (fd < 0 || ftruncate(fd, (off_t)VFIO_PCI_NUM_REGIONS << REGION_BITS) ||
	    pwrite(fd, config, sizeof config, (off_t)VFIO_PCI_CONFIG_REGION_INDEX << REGION_BITS) != sizeof config)
		return refused(EIO);
	return fd;
}

static int describe_region(struct vfio_region_info *info)
{
	const uint32_t access = VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE;

	if (info->index >= VFIO_PCI_NUM_REGIONS)
		return refused(EINVAL);
	info->flags = access;
	info->offset = (uint64_t)info->index << REGION_BITS;
	info->size = 0;
	if (info->index == VFIO_PCI_CONFIG_REGION_INDEX)
		info->size = CONFIG_BYTES;
	if (info->index == VFIO_PCI_BAR0_REGION_INDEX) {
		info->size = BAR_BYTES;
		info->flags |= VFIO_REGION_INFO_FLAG_MMAP;
	}
	return 0;
}

static int answer(unsigned long request, void *argument)
{
	switch (request) {
	case VFIO_GET_API_VERSION:
		return VFIO_API_VERSION;
	case VFIO_CHECK_EXTENSION:
		return 1;
	case VFIO_GROUP_GET_STATUS:
		((struct vfio_group_status *)argument)->flags = VFIO_GROUP_FLAGS_VIABLE;
		return 0;
	case VFIO_GROUP_GET_DEVICE_FD:
		return open_device(argument);
	case VFIO_DEVICE_GET_INFO: {
		struct vfio_device_info *info = argument;

		info->flags = VFIO_DEVICE_FLAGS_PCI | VFIO_DEVICE_FLAGS_RESET;
		info->num_regions = VFIO_PCI_NUM_REGIONS;
		info->num_irqs = VFIO_PCI_NUM_IRQS;
		return 0;
	}
	case VFIO_DEVICE_GET_REGION_INFO:
		return describe_region(argument);
	case VFIO_DEVICE_GET_IRQ_INFO:
		((struct vfio_irq_info *)argument)->flags = 0;
		((struct vfio_irq_info *)argument)->count = 0;
		return 0;
	case IOMMU_IOAS_ALLOC:
		((struct iommu_ioas_alloc *)argument)->out_ioas_id = 1;
		return 0;
	case IOMMU_DESTROY:
	case VFIO_SET_IOMMU:
	case VFIO_GROUP_SET_CONTAINER:
	case VFIO_GROUP_UNSET_CONTAINER:
	case VFIO_DEVICE_RESET:
	case VFIO_IOMMU_MAP_DMA:
	case VFIO_IOMMU_UNMAP_DMA:
	/* Of KVM's device, which is told of the groups. */
	case KVM_SET_DEVICE_ATTR:
	case KVM_HAS_DEVICE_ATTR:
		return 0;
	default:
		return refused(ENOTTY);
	}
}

int ioctl(int fd, unsigned long request, ...)
{
	int (*real)(int, unsigned long, void *) = (int (*)(int, unsigned long, void *))dlsym(RTLD_NEXT, "ioctl");
	va_list list;
	void *argument;

	va_start(list, request);
	argument = va_arg(list, void *);
	va_end(list);
	if (request == KVM_CREATE_DEVICE && ((struct kvm_create_device *)argument)->type == KVM_DEV_TYPE_VFIO) {
		int device = made();

		if (device < 0)
			return -1;
		((struct kvm_create_device *)argument)->fd = (uint32_t)device;
		return 0;
	}
	if ((_IOC_TYPE(request) == VFIO_TYPE || request == KVM_SET_DEVICE_ATTR || request == KVM_HAS_DEVICE_ATTR) && is_ours(fd))
		return answer(request, argument);
	return real(fd, request, argument);
}

static int opened(const char *symbol, const char *path, int flags, mode_t mode)
{
	int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, symbol);

	if (!strncmp(path, DEVICES, strlen(DEVICES)))
		return open_device(path + strlen(DEVICES));
	if (!strncmp(path, "/dev/vfio/", 10) || !strcmp(path, "/dev/iommu"))
		return made();
	return real(path, flags, mode);
}

int open(const char *path, int flags, ...)
{
	va_list list;
	mode_t mode;

	va_start(list, flags);
	mode = va_arg(list, mode_t);
	va_end(list);
	return opened("open", path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
	va_list list;
	mode_t mode;

	va_start(list, flags);
	mode = va_arg(list, mode_t);
	va_end(list);
	return opened("open64", path, flags, mode);
}
