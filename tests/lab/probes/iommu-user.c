// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Runs in a Debian guest whose virtio disk is behind a virtual IOMMU and bound to vfio-pci: a driver of it in a
 * process of the guest, with a container of type 1 that maps what the disk may reach.
 *
 *   iommu-user DEVICE COPY    its directory in /sys/bus/pci/devices; COPY becomes what the disk holds
 *
 * The disk's first sectors are read by mapped addresses, and written to the same place with all bits inverted. Then
 * the mapping of a page is removed, and the disk is told to read into it: the page has to stay as it was, and the
 * device has to ask for a reset. After one, with the page mapped again, it works. The last line says "done" or "failed".
 */
#include <fcntl.h>
#include <linux/vfio.h>
#include <linux/virtio_blk.h>
#include <linux/virtio_config.h>
#include <linux/virtio_pci.h>
#include <linux/virtio_ring.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096u
#define SECTOR 512u
/* Pages of the memory that both use: the rings, the request, and data. */
#define RINGS 0u
#define REQUEST 3u
#define DATA 4u
#define PAGES 12u
/* Neither an address of the guest's memory nor one of the process. */
#define IOVA 0x2340000000ull
#define BYTES (256u * 1024)
#define PATIENCE_S 30
#define QUEUE_SIZE 16u
#define UNTOUCHED 0x5a

static uint8_t *memory;
static int container, device;
static volatile struct virtio_pci_common_cfg *common;
static volatile uint16_t *doorbell;
static uint8_t *bars[6];
static size_t bar_bytes[6];
static struct vring ring;
static uint16_t seen;

static void die(const char *what)
{
	perror(what);
	printf("failed\n");
	exit(1);
}

static void wrong(const char *what)
{
	printf("%s\nfailed\n", what);
	exit(1);
}

static uint64_t iova_of(unsigned page)
{
	return IOVA + (uint64_t)page * PAGE;
}

static void map(unsigned page, unsigned count)
{
	struct vfio_iommu_type1_dma_map map = {
		.argsz = sizeof(map),
		.flags = VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE,
		.vaddr = (uintptr_t)(memory + page * PAGE),
		.iova = iova_of(page),
		.size = (uint64_t)count * PAGE,
	};

	if (ioctl(container, VFIO_IOMMU_MAP_DMA, &map))
		die("VFIO_IOMMU_MAP_DMA");
}

static void unmap(unsigned page)
{
	struct vfio_iommu_type1_dma_unmap unmap = {
		.argsz = sizeof(unmap),
		.iova = iova_of(page),
		.size = PAGE,
	};

	if (ioctl(container, VFIO_IOMMU_UNMAP_DMA, &unmap) || unmap.size != PAGE)
		die("VFIO_IOMMU_UNMAP_DMA");
}

/* Opens the device through its group. */
static void open_device(const char *directory)
{
	char path[512], link[512];
	const char *name = strrchr(directory, '/');
	struct vfio_group_status status = { .argsz = sizeof(status) };
	ssize_t length;
	int group;

	if (!name)
		wrong("the device is not a directory's path");
	snprintf(path, sizeof(path), "%s/iommu_group", directory);
	length = readlink(path, link, sizeof(link) - 1);
	if (length < 0)
		die(path);
	link[length] = 0;
	snprintf(path, sizeof(path), "/dev/vfio/%s", strrchr(link, '/') + 1);
	container = open("/dev/vfio/vfio", O_RDWR | O_CLOEXEC);
	if (container < 0)
		die("/dev/vfio/vfio");
	group = open(path, O_RDWR | O_CLOEXEC);
	if (group < 0)
		die(path);
	if (ioctl(group, VFIO_GROUP_GET_STATUS, &status) || !(status.flags & VFIO_GROUP_FLAGS_VIABLE))
		die("the group is not viable");
	if (ioctl(group, VFIO_GROUP_SET_CONTAINER, &container) ||
	    ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU))
		die("the container is refused");
	device = ioctl(group, VFIO_GROUP_GET_DEVICE_FD, name + 1);
	if (device < 0)
		die("VFIO_GROUP_GET_DEVICE_FD");
}

static struct vfio_region_info region(unsigned index)
{
	struct vfio_region_info info = { .argsz = sizeof(info), .index = index };

	if (ioctl(device, VFIO_DEVICE_GET_REGION_INFO, &info))
		die("VFIO_DEVICE_GET_REGION_INFO");
	return info;
}

/* The register block of a capability. */
static uint8_t *block(unsigned bar, uint32_t offset, uint32_t length)
{
	if (bar >= 6)
		wrong("a capability names a BAR that does not exist");
	if (!bars[bar]) {
		struct vfio_region_info info = region(bar);

		bars[bar] = mmap(NULL, info.size, PROT_READ | PROT_WRITE, MAP_SHARED, device, (off_t)info.offset);
		if (bars[bar] == MAP_FAILED)
			die("mapping a BAR");
		bar_bytes[bar] = info.size;
	}
	if (offset > bar_bytes[bar] || length > bar_bytes[bar] - offset)
		wrong("a capability names registers outside of its BAR");
	return bars[bar] + offset;
}

/* Finds the registers, and lets the device access memory. */
static void find_registers(void)
{
	struct vfio_region_info config = region(VFIO_PCI_CONFIG_REGION_INDEX);
	uint8_t space[256], *notify = NULL;
	uint32_t multiplier = 0;
	uint16_t command;

	if (pread(device, space, sizeof(space), (off_t)config.offset) != sizeof(space))
		die("configuration space");
	for (unsigned at = space[0x34]; at >= 0x40 && at <= sizeof(space) - 20; at = space[at + 1]) {
		uint32_t offset, length;

		if (space[at] != 0x09)
			continue;
		memcpy(&offset, space + at + 8, 4);
		memcpy(&length, space + at + 12, 4);
		if (space[at + 3] == VIRTIO_PCI_CAP_COMMON_CFG) {
			common = (void *)block(space[at + 4], offset, length);
		} else if (space[at + 3] == VIRTIO_PCI_CAP_NOTIFY_CFG) {
			notify = block(space[at + 4], offset, length);
			memcpy(&multiplier, space + at + 16, 4);
		}
	}
	if (!common || !notify)
		wrong("the device lacks the registers of virtio");
	memcpy(&command, space + 4, 2);
	command |= 0x6;
	if (pwrite(device, &command, 2, (off_t)config.offset + 4) != 2)
		die("the command register");
	common->queue_select = 0;
	doorbell = (void *)(notify + (size_t)common->queue_notify_off * multiplier);
}

/* Sets the device up with one queue. */
static void start(void)
{
	const uint8_t begun = VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER;

	common->device_status = 0;
	while (common->device_status)
		usleep(1000);
	common->device_status = begun;
	common->device_feature_select = 1;
	if (!(common->device_feature & 1u << (VIRTIO_F_ACCESS_PLATFORM - 32)))
		wrong("the device does not offer ACCESS_PLATFORM");
	common->guest_feature_select = 0;
	common->guest_feature = 0;
	common->guest_feature_select = 1;
	common->guest_feature = 1u << (VIRTIO_F_VERSION_1 - 32) | 1u << (VIRTIO_F_ACCESS_PLATFORM - 32);
	common->device_status = begun | VIRTIO_CONFIG_S_FEATURES_OK;
	if (!(common->device_status & VIRTIO_CONFIG_S_FEATURES_OK))
		wrong("the device refuses the features");
	memset(memory + RINGS * PAGE, 0, REQUEST * PAGE);
	vring_init(&ring, QUEUE_SIZE, memory + RINGS * PAGE, PAGE);
	common->queue_select = 0;
	common->queue_size = QUEUE_SIZE;
	common->queue_desc_lo = (uint32_t)iova_of(RINGS);
	common->queue_desc_hi = (uint32_t)(iova_of(RINGS) >> 32);
	common->queue_avail_lo = (uint32_t)(iova_of(RINGS) + ((uint8_t *)ring.avail - memory));
	common->queue_avail_hi = (uint32_t)(iova_of(RINGS) >> 32);
	common->queue_used_lo = (uint32_t)(iova_of(RINGS) + ((uint8_t *)ring.used - memory));
	common->queue_used_hi = (uint32_t)(iova_of(RINGS) >> 32);
	common->queue_enable = 1;
	seen = 0;
	common->device_status = begun | VIRTIO_CONFIG_S_FEATURES_OK | VIRTIO_CONFIG_S_DRIVER_OK;
}

/* True if a page of the disk was read into, or written from, a page; false if the device asks for a reset. */
static bool request(uint32_t type, uint64_t sector, unsigned page)
{
	struct virtio_blk_outhdr *header = (void *)(memory + REQUEST * PAGE);
	volatile uint8_t *status = memory + REQUEST * PAGE + 64;
	uint16_t writes = type == VIRTIO_BLK_T_IN ? VRING_DESC_F_WRITE : 0;
	time_t end = time(NULL) + PATIENCE_S;

	*header = (struct virtio_blk_outhdr){ .type = type, .sector = sector };
	*status = 0xff;
	ring.desc[0] = (struct vring_desc){ iova_of(REQUEST), sizeof(*header), VRING_DESC_F_NEXT, 1 };
	ring.desc[1] = (struct vring_desc){ iova_of(page), PAGE, VRING_DESC_F_NEXT | writes, 2 };
	ring.desc[2] = (struct vring_desc){ iova_of(REQUEST) + 64, 1, VRING_DESC_F_WRITE, 0 };
	ring.avail->ring[ring.avail->idx % QUEUE_SIZE] = 0;
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	__atomic_store_n(&ring.avail->idx, (uint16_t)(ring.avail->idx + 1), __ATOMIC_RELEASE);
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	*doorbell = 0;
	while (__atomic_load_n(&ring.used->idx, __ATOMIC_ACQUIRE) == seen) {
		if (common->device_status & VIRTIO_CONFIG_S_NEEDS_RESET)
			return false;
		if (time(NULL) > end)
			wrong("a request does not end");
		usleep(100);
	}
	seen++;
	if (*status != VIRTIO_BLK_S_OK)
		wrong("a request fails");
	return true;
}

/* Reads the disk, and writes it back inverted. */
static void copy_and_invert(const char *to)
{
	int out = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	uint64_t *words = (void *)(memory + DATA * PAGE);

	if (out < 0)
		die(to);
	for (unsigned at = 0; at < BYTES; at += PAGE) {
		memset(words, UNTOUCHED, PAGE);
		if (!request(VIRTIO_BLK_T_IN, at / SECTOR, DATA))
			wrong("the device asks for a reset as it reads");
		if (write(out, words, PAGE) != PAGE)
			die(to);
		for (unsigned word = 0; word < PAGE / 8; word++)
			words[word] = ~words[word];
		if (!request(VIRTIO_BLK_T_OUT, at / SECTOR, DATA))
			wrong("the device asks for a reset as it writes");
	}
	if (close(out))
		die(to);
}

static bool untouched(unsigned page)
{
	for (unsigned at = 0; at < PAGE; at++)
		if (memory[page * PAGE + at] != UNTOUCHED)
			return false;
	return true;
}

int main(int argc, char **argv)
{
	const unsigned last = PAGES - 1;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc != 3)
		wrong("iommu-user DEVICE COPY");
	open_device(argv[1]);
	memory = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (memory == MAP_FAILED)
		die("memory");
	map(0, last);
	map(last, 1);
	find_registers();
	start();
	copy_and_invert(argv[2]);
	if (!request(VIRTIO_BLK_T_IN, 0, last))
		wrong("the last page is not reached while it is mapped");
	memset(memory + last * PAGE, UNTOUCHED, PAGE);
	unmap(last);
	if (request(VIRTIO_BLK_T_IN, 0, last))
		wrong("a request by a removed mapping succeeds");
	if (!untouched(last))
		wrong("the disk reaches a page whose mapping is gone");
	map(last, 1);
	start();
	if (!request(VIRTIO_BLK_T_IN, 0, last) || untouched(last))
		wrong("after a reset the disk does not work");
	printf("done\n");
	return 0;
}
