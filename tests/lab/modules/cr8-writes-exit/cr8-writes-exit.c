// SPDX-License-Identifier: GPL-2.0-only
/*
 * Keeps kvm-amd from letting guests write CR8 by themselves, for the lab: QEMU's emulation of SVM (10.0) aborts when a
 * nested guest writes CR8 while a virtual interrupt is pending, as EDK2's interrupt handlers do. kvm-amd intercepts
 * those writes when a vCPU starts, and then as svm_update_cr8_intercept() says, which does nothing here.
 */
#include <linux/kprobes.h>
#include <linux/module.h>

static notrace noinline void nothing(void)
{
	barrier();
}

static int skip(struct kprobe *probe, struct pt_regs *regs)
{
	/* At the function's first instruction: another one returns in its place. */
	regs->ip = (unsigned long)nothing;
	return 1;
}
NOKPROBE_SYMBOL(skip);

static struct kprobe probe = {
	.symbol_name = "svm_update_cr8_intercept",
	.pre_handler = skip,
};

static int __init cr8_writes_exit_init(void)
{
	return register_kprobe(&probe);
}

static void __exit cr8_writes_exit_exit(void)
{
	unregister_kprobe(&probe);
}

module_init(cr8_writes_exit_init);
module_exit(cr8_writes_exit_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Intercepts all writes of guests to CR8");
