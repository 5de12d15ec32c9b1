// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

package clients

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// One of several, in the order in which they are made: that of a map differs from run to run.
type request struct{ method, body string }

// Every method of the client, in the course of a VM's life: two VMMs, as it moves from one to the other.
func TestEveryMethodIsAnswered(t *testing.T) {
	// The VMM makes taps itself, where they can be made.
	openTap(t).Close()
	there, here := start(t), start(t)
	snapshot := here.folder + "/snapshot"
	noError(t, os.Mkdir(snapshot, 0o700))
	here.live(snapshot)
	here.move(there)
	there.grow()
	there.end(snapshot)
	for _, method := range there.methods() {
		if !here.called[method] && !there.called[method] {
			t.Errorf("%s was not called", method)
		}
	}
}

// live is the life of a VM until it moves.
func (v *vmm) live(snapshot string) {
	v.t.Helper()
	v.refused("VmInfoGet", "", 404, "no VM")
	v.must("CreateVM", fmt.Sprintf(`{
		"balloon": {"size": 0},
		"console": {"mode": "Off"},
		"cpus": {"boot_vcpus": 1, "max_vcpus": 2},
		"memory": {
			"hotplug_method": "VirtioMem", "size": 0,
			"zones": [{"hotplug_size": 268435456, "id": "ram", "shared": true, "size": 268435456}]
		},
		"payload": {"cmdline": "workload=disk-read mem=32M", "kernel": %q},
		"serial": {"mode": "Off"}
	}`, os.Getenv("GODWIT_GUEST")))
	v.info("Created")
	// Before the boot the answer is empty.
	v.must("VmAddDiskPut", fmt.Sprintf(`{"id": "image", "image_type": "Raw", "path": %q}`, v.disk("image")))
	v.must("VmAddNetPut", `{"id": "net", "mac": "2e:89:a8:e4:92:01"}`)
	v.must("VmRemoveDevicePut", `{"id": "net"}`)
	v.must("BootVM", "")
	v.info("Running")
	v.reads("image")
	// First, as memory that was added excludes some of these devices.
	v.refuse()
	v.must("VmResizePut", `{"desired_balloon": 33554432}`)
	v.must("VmResizeDiskPut", `{"desired_size": 2097152, "id": "image"}`)
	v.must("VmResizeZonePut", `{"desired_ram": 402653184, "id": "ram"}`)
	v.must("PauseVM", "")
	v.info("Paused")
	v.must("VmSnapshotPut", fmt.Sprintf(`{"destination_url": "file://%s"}`, snapshot))
	v.must("VmCoredumpPut", fmt.Sprintf(`{"destination_url": "file://%s/core"}`, v.folder))
	if _, err := os.Stat(v.folder + "/core"); err != nil {
		v.t.Fatal(err)
	}
	v.must("ResumeVM", "")
	v.info("Running")
	v.must("PowerButtonVM", "")
	v.reads("image")
}

// move has the VM run in another VMM.
func (v *vmm) move(there *vmm) {
	v.t.Helper()
	socket := filepath.Join(there.folder, "move")
	received := make(chan error, 1)
	go func() {
		body := fmt.Sprintf(`{"receiver_url": "unix:%s"}`, socket)
		_, _, err := there.call("VmReceiveMigrationPut", body, 2*patience)
		received <- err
	}()
	there.waitFor("the socket of the migration", func() bool {
		_, err := os.Stat(socket)
		return err == nil
	})
	// One that cloud-hypervisor does not have.
	if v.has("VmMigrateCheckPut") {
		v.must("VmMigrateCheckPut", fmt.Sprintf(`{"destination_url": "unix:%s"}`, socket))
	}
	v.must("VmSendMigrationPut", fmt.Sprintf(`{"destination_url": "unix:%s"}`, socket))
	if err := <-received; err != nil {
		v.t.Fatalf("VmReceiveMigrationPut: %v: %s", err, reasons(err))
	}
	v.ends()
	there.info("Running")
	there.reads("image")
	// Requests that cloud-hypervisor does not have; one is answered by text.
	if there.has("VmMetricsGet") {
		_, response, err := there.call("VmMetricsGet", "", patience)
		if err != nil || response.StatusCode != 200 {
			v.t.Fatalf("VmMetricsGet: %v", err)
		}
	}
	for _, method := range []string{"VmMigrationProgressGet", "VmMigrationReportGet"} {
		if there.has(method) {
			there.must(method, "")
		}
	}
}

// refuse asks for what cannot be had here; each reason names it. An empty path is refused at once, and a
// socket at which no process listens after ten seconds.
func (v *vmm) refuse() {
	v.t.Helper()
	nowhere := v.folder + "/nowhere"
	v.refused("VmAddDevicePut", fmt.Sprintf(`{"path": %q}`, nowhere), 500, nowhere)
	v.refused("VmAddVdpaPut", fmt.Sprintf(`{"num_queues": 1, "path": %q}`, nowhere), 500, nowhere)
	for _, request := range []request{
		{"VmAddUserDevicePut", ``},
		{"VmAddFsPut", `, "num_queues": 1, "queue_size": 1024, "tag": "t"`},
		{"VmAddGenericVhostUserPut", `, "device_type": 26, "queue_sizes": [1024]`},
	} {
		if v.has(request.method) {
			v.refused(request.method, fmt.Sprintf(`{"socket": ""%s}`, request.body), 400, "socket")
		}
	}
	// Requests that cloud-hypervisor does not have, for what is not going on.
	for _, request := range []request{
		{"VmMigrationCancelPut", ""},
		{"VmMigrationRecoverPut", `{"url": "unix:/nowhere"}`},
		{"VmMigrationStartPostcopyPut", ""},
		{"VmSnapshotCancelPut", ""},
	} {
		if v.has(request.method) {
			v.refused(request.method, request.body, 404, "no ")
		}
	}
}

// grow adds devices while it runs: the answer is where they are.
func (v *vmm) grow() {
	v.t.Helper()
	pmem := filepath.Join(v.folder, "pmem")
	noError(v.t, os.WriteFile(pmem, make([]byte, 2<<20), 0o600))
	for _, request := range []request{
		{"VmAddDiskPut", fmt.Sprintf(`{"image_type": "Raw", "path": %q}`, v.disk("volume"))},
		{"VmAddNetPut", `{"mac": "2e:89:a8:e4:92:02"}`},
		{"VmAddPmemPut", fmt.Sprintf(`{"file": %q}`, pmem)},
		{"VmAddVsockPut", fmt.Sprintf(`{"cid": 3, "socket": "%s/vsock"}`, v.folder)},
	} {
		added := v.must(request.method, request.body)
		if bdf, _ := added["bdf"].(string); !slot.MatchString(bdf) || added["id"] == "" {
			v.t.Fatalf("%s: %v", request.method, added)
		}
	}
}

// end is the rest of its life, and a second one.
func (v *vmm) end(snapshot string) {
	v.t.Helper()
	v.must("RebootVM", "")
	v.reads("image")
	if v.has("VmNmiPut") {
		v.must("VmNmiPut", "")
	}
	if v.has("VmmNmiPut") {
		// Described so until version 52, and never answered by cloud-hypervisor either.
		_, response, err := v.call("VmmNmiPut", "", patience)
		if err == nil || response == nil || response.StatusCode != 404 {
			v.t.Fatalf("VmmNmiPut: %v, %v", response, err)
		}
	}
	v.must("ShutdownVM", "")
	v.must("DeleteVM", "")
	v.refused("VmInfoGet", "", 404, "no VM")
	v.must("VmRestorePut", fmt.Sprintf(`{"source_url": "file://%s"}`, snapshot))
	v.info("Paused")
	v.must("ResumeVM", "")
	v.reads("image")
	v.must("DeleteVM", "")
	v.must("ShutdownVMM", "")
	v.ends()
}
