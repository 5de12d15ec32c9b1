// SPDX-License-Identifier: GPL-2.0-only
/*
 * VFIO with migration for QEMU's "edu" device, for the lab: a function that does real DMA through the
 * IOMMU and can be moved with its guest, which no other emulated device can.
 *
 * The state of the hardware is a handful of registers. Its DMA buffer of 4 KiB is reached by DMA alone,
 * which only the guest can program, so it does not move: a guest fills it anew after a move. DMA that is
 * under way when the function is stopped ends first. There is no P2P state and no log of DMA writes.
 */
#include <linux/anon_inodes.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/io-64-nonatomic-lo-hi.h>
#include <linux/iopoll.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/uaccess.h>
#include <linux/vfio.h>
#include <linux/vfio_pci_core.h>

#define EDU_VENDOR 0x1234
#define EDU_DEVICE 0x11e8

/* docs/specs/edu.rst of QEMU. Reading LIVENESS gives the inverse of what was written. */
#define EDU_LIVENESS 0x04
#define EDU_STATUS 0x20
#define EDU_IRQ_STATUS 0x24
#define EDU_IRQ_RAISE 0x60
#define EDU_IRQ_ACK 0x64
#define EDU_DMA_SOURCE 0x80
#define EDU_DMA_TARGET 0x88
#define EDU_DMA_COUNT 0x90
#define EDU_DMA_COMMAND 0x98
#define EDU_DMA_RUNS 1
/* A transfer takes 100 ms of the machine's time, which may be slow. */
#define EDU_DMA_POLL_US 1000
#define EDU_DMA_LIMIT_US (10 * USEC_PER_SEC)

#define STATE_MAGIC 0x21756465
#define STATE_VERSION 1

struct edu_state {
	__le32 magic;
	__le32 version;
	__le32 liveness;
	__le32 status;
	__le32 irq_status;
	__le32 reserved;
	__le64 dma_source;
	__le64 dma_target;
	__le64 dma_count;
};

/* What goes through a descriptor of a data transfer state. It may outlive that state. */
struct edu_stream {
	struct mutex lock;
	struct edu_state state;
	size_t done;
	bool is_over;
};

struct edu_function {
	/* First, as vfio_alloc_device() wants it. */
	struct vfio_pci_core_device core;
	struct mutex lock;
	enum vfio_device_mig_state state;
	/* The file of the stream in STOP_COPY and RESUMING, with a reference. */
	struct file *file;
};

static struct edu_function *function_of(struct vfio_device *vdev)
{
	return container_of(vdev, struct edu_function, core.vdev);
}

static void __iomem *registers_of(struct edu_function *edu)
{
	return edu->core.barmap[0];
}

static int wait_for_dma(struct edu_function *edu)
{
	u64 command;

	return readq_poll_timeout(registers_of(edu) + EDU_DMA_COMMAND, command,
				  !(command & EDU_DMA_RUNS), EDU_DMA_POLL_US,
				  EDU_DMA_LIMIT_US);
}

static void read_registers(struct edu_function *edu, struct edu_state *state)
{
	void __iomem *bar = registers_of(edu);

	*state = (struct edu_state){
		.magic = cpu_to_le32(STATE_MAGIC),
		.version = cpu_to_le32(STATE_VERSION),
		.liveness = cpu_to_le32(readl(bar + EDU_LIVENESS)),
		.status = cpu_to_le32(readl(bar + EDU_STATUS)),
		.irq_status = cpu_to_le32(readl(bar + EDU_IRQ_STATUS)),
		.dma_source = cpu_to_le64(readq(bar + EDU_DMA_SOURCE)),
		.dma_target = cpu_to_le64(readq(bar + EDU_DMA_TARGET)),
		.dma_count = cpu_to_le64(readq(bar + EDU_DMA_COUNT)),
	};
}

static void write_registers(struct edu_function *edu, const struct edu_state *state)
{
	void __iomem *bar = registers_of(edu);
	u32 raised = le32_to_cpu(state->irq_status);

	writel(~le32_to_cpu(state->liveness), bar + EDU_LIVENESS);
	writel(le32_to_cpu(state->status), bar + EDU_STATUS);
	writel(readl(bar + EDU_IRQ_STATUS), bar + EDU_IRQ_ACK);
	if (raised)
		writel(raised, bar + EDU_IRQ_RAISE);
	writeq(le64_to_cpu(state->dma_source), bar + EDU_DMA_SOURCE);
	writeq(le64_to_cpu(state->dma_target), bar + EDU_DMA_TARGET);
	writeq(le64_to_cpu(state->dma_count), bar + EDU_DMA_COUNT);
}

static ssize_t stream_read(struct file *file, char __user *to, size_t len, loff_t *pos)
{
	struct edu_stream *stream = file->private_data;
	ssize_t count;

	mutex_lock(&stream->lock);
	count = min_t(size_t, len, sizeof(stream->state) - stream->done);
	if (stream->is_over)
		count = -ENODEV;
	else if (copy_to_user(to, (u8 *)&stream->state + stream->done, count))
		count = -EFAULT;
	else
		stream->done += count;
	mutex_unlock(&stream->lock);
	return count;
}

static ssize_t stream_write(struct file *file, const char __user *from, size_t len, loff_t *pos)
{
	struct edu_stream *stream = file->private_data;
	ssize_t count = len;

	mutex_lock(&stream->lock);
	if (stream->is_over)
		count = -ENODEV;
	else if (len > sizeof(stream->state) - stream->done)
		count = -ENOSPC;
	else if (copy_from_user((u8 *)&stream->state + stream->done, from, len))
		count = -EFAULT;
	else
		stream->done += count;
	mutex_unlock(&stream->lock);
	return count;
}

static int stream_release(struct inode *inode, struct file *file)
{
	kfree(file->private_data);
	return 0;
}

static const struct file_operations saving_fops = {
	.owner = THIS_MODULE,
	.read = stream_read,
	.release = stream_release,
};

static const struct file_operations resuming_fops = {
	.owner = THIS_MODULE,
	.write = stream_write,
	.release = stream_release,
};

/* Begins a data transfer; the caller of VFIO gets the file. */
static struct file *begin_stream(struct edu_function *edu, bool saves)
{
	struct edu_stream *stream = kzalloc(sizeof(*stream), GFP_KERNEL_ACCOUNT);
	struct file *file;

	if (!stream)
		return ERR_PTR(-ENOMEM);
	mutex_init(&stream->lock);
	if (saves)
		read_registers(edu, &stream->state);
	file = anon_inode_getfile("edu-vfio-pci", saves ? &saving_fops : &resuming_fops, stream,
				  saves ? O_RDONLY : O_WRONLY);
	if (IS_ERR(file)) {
		kfree(stream);
		return file;
	}
	stream_open(file_inode(file), file);
	edu->file = get_file(file);
	return file;
}

static void end_stream(struct edu_function *edu)
{
	struct edu_stream *stream;

	if (!edu->file)
		return;
	stream = edu->file->private_data;
	mutex_lock(&stream->lock);
	stream->is_over = true;
	mutex_unlock(&stream->lock);
	fput(edu->file);
	edu->file = NULL;
}

static int take_state(struct edu_function *edu)
{
	struct edu_stream *stream = edu->file->private_data;
	int error = 0;

	mutex_lock(&stream->lock);
	if (stream->done != sizeof(stream->state) ||
	    stream->state.magic != cpu_to_le32(STATE_MAGIC) ||
	    stream->state.version != cpu_to_le32(STATE_VERSION))
		error = -EINVAL;
	else
		write_registers(edu, &stream->state);
	mutex_unlock(&stream->lock);
	return error;
}

/* One arc of the state machine. */
static struct file *take_arc(struct edu_function *edu, enum vfio_device_mig_state to)
{
	int error = 0;

	switch (edu->state) {
	case VFIO_DEVICE_STATE_RUNNING:
		/* Nothing but the guest begins DMA, and its processors stand. */
		error = wait_for_dma(edu);
		break;
	case VFIO_DEVICE_STATE_STOP:
		if (to == VFIO_DEVICE_STATE_STOP_COPY)
			return begin_stream(edu, true);
		if (to == VFIO_DEVICE_STATE_RESUMING)
			return begin_stream(edu, false);
		break;
	case VFIO_DEVICE_STATE_STOP_COPY:
		end_stream(edu);
		break;
	case VFIO_DEVICE_STATE_RESUMING:
		error = take_state(edu);
		if (!error)
			end_stream(edu);
		break;
	default:
		error = -EINVAL;
	}
	return error ? ERR_PTR(error) : NULL;
}

static struct file *edu_set_state(struct vfio_device *vdev, enum vfio_device_mig_state to)
{
	struct edu_function *edu = function_of(vdev);
	enum vfio_device_mig_state next;
	struct file *file = NULL;
	int error;

	mutex_lock(&edu->lock);
	while (edu->state != to) {
		error = vfio_mig_get_next_state(vdev, edu->state, to, &next);
		file = error ? ERR_PTR(error) : take_arc(edu, next);
		if (IS_ERR(file))
			break;
		edu->state = next;
	}
	mutex_unlock(&edu->lock);
	return file;
}

static int edu_get_state(struct vfio_device *vdev, enum vfio_device_mig_state *state)
{
	struct edu_function *edu = function_of(vdev);

	mutex_lock(&edu->lock);
	*state = edu->state;
	mutex_unlock(&edu->lock);
	return 0;
}

static int edu_get_data_size(struct vfio_device *vdev, unsigned long *len)
{
	*len = sizeof(struct edu_state);
	return 0;
}

static const struct vfio_migration_ops edu_migration_ops = {
	.migration_set_state = edu_set_state,
	.migration_get_state = edu_get_state,
	.migration_get_data_size = edu_get_data_size,
};

static int edu_init(struct vfio_device *vdev)
{
	struct edu_function *edu = function_of(vdev);

	mutex_init(&edu->lock);
	vdev->migration_flags = VFIO_MIGRATION_STOP_COPY;
	vdev->mig_ops = &edu_migration_ops;
	return vfio_pci_core_init_dev(vdev);
}

static int edu_open(struct vfio_device *vdev)
{
	struct edu_function *edu = function_of(vdev);
	/* As after power-on, as far as that can be told from outside. */
	const struct edu_state fresh = {};
	int error = vfio_pci_core_enable(&edu->core);

	if (error)
		return error;
	error = vfio_pci_core_setup_barmap(&edu->core, 0);
	if (!error)
		error = wait_for_dma(edu);
	if (error) {
		vfio_pci_core_disable(&edu->core);
		return error;
	}
	write_registers(edu, &fresh);
	edu->state = VFIO_DEVICE_STATE_RUNNING;
	vfio_pci_core_finish_enable(&edu->core);
	return 0;
}

static void edu_close(struct vfio_device *vdev)
{
	struct edu_function *edu = function_of(vdev);

	mutex_lock(&edu->lock);
	end_stream(edu);
	mutex_unlock(&edu->lock);
	vfio_pci_core_close_device(vdev);
}

static const struct vfio_device_ops edu_ops = {
	.name = "edu-vfio-pci",
	.init = edu_init,
	.release = vfio_pci_core_release_dev,
	.open_device = edu_open,
	.close_device = edu_close,
	.ioctl = vfio_pci_core_ioctl,
	.device_feature = vfio_pci_core_ioctl_feature,
	.read = vfio_pci_core_read,
	.write = vfio_pci_core_write,
	.mmap = vfio_pci_core_mmap,
	.request = vfio_pci_core_request,
	.match = vfio_pci_core_match,
	.bind_iommufd = vfio_iommufd_physical_bind,
	.unbind_iommufd = vfio_iommufd_physical_unbind,
	.attach_ioas = vfio_iommufd_physical_attach_ioas,
	.detach_ioas = vfio_iommufd_physical_detach_ioas,
};

static int edu_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct edu_function *edu;
	int error;

	edu = vfio_alloc_device(edu_function, core.vdev, &pdev->dev, &edu_ops);
	if (IS_ERR(edu))
		return PTR_ERR(edu);
	dev_set_drvdata(&pdev->dev, &edu->core);
	error = vfio_pci_core_register_device(&edu->core);
	if (error)
		vfio_put_device(&edu->core.vdev);
	return error;
}

static void edu_remove(struct pci_dev *pdev)
{
	struct vfio_pci_core_device *core = dev_get_drvdata(&pdev->dev);

	vfio_pci_core_unregister_device(core);
	vfio_put_device(&core->vdev);
}

static const struct pci_device_id edu_ids[] = {
	{ PCI_DRIVER_OVERRIDE_DEVICE_VFIO(EDU_VENDOR, EDU_DEVICE) },
	{}
};
MODULE_DEVICE_TABLE(pci, edu_ids);

static struct pci_driver edu_driver = {
	.name = "edu-vfio-pci",
	.id_table = edu_ids,
	.probe = edu_probe,
	.remove = edu_remove,
	.err_handler = &vfio_pci_core_err_handlers,
	.driver_managed_dma = true,
};
module_pci_driver(edu_driver);

MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("VFIO with migration for QEMU's edu device");
