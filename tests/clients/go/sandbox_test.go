// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

package clients

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"testing"
	"time"
)

// The requests of Kata's runtime in Go, in its order, with its fields and their default values.

var slot = regexp.MustCompile(`^0000:00:[0-9a-f]{2}\.0$`)

// sandbox is the configuration of one: with Kata's defaults, but for the file system, whose server is not here.
func (v *vmm) sandbox(iommu bool) string {
	segments := ""
	if iommu {
		segments = `, "iommu_segments": [0]`
	}
	return fmt.Sprintf(`{
		"balloon": {"deflate_on_oom": false, "free_page_reporting": true, "size": 0},
		"console": {"iommu": %[1]t, "mode": "Off"},
		"cpus": {
			"boot_vcpus": 1, "kvm_hyperv": false, "max_vcpus": 4, "nested": true,
			"topology": {"cores_per_die": 4, "dies_per_package": 1, "packages": 1, "threads_per_core": 1}
		},
		"disks": [{
			"backing_files": false, "direct": false, "image_type": "Raw", "iommu": %[1]t, "num_queues": 1,
			"path": %[2]q, "queue_size": 128, "readonly": true, "sparse": true, "vhost_user": false
		}],
		"iommu": false, "landlock_enable": false,
		"memory": {
			"hotplug_method": "Acpi", "hotplug_size": 4294967296, "hugepages": false, "mergeable": false,
			"prefault": false, "shared": true, "size": 268435456, "thp": true
		},
		"payload": {"cmdline": "workload=disk-read mem=32M", "kernel": %[3]q},
		"platform": {"num_pci_segments": 2, "sev_snp": false, "tdx": false%[4]s},
		"pvpanic": false,
		"rng": {"iommu": %[1]t, "src": "/dev/urandom"},
		"serial": {"iommu": false, "mode": "Off"},
		"vsock": {"cid": 3, "iommu": %[1]t, "socket": %[5]q},
		"watchdog": false
	}`, iommu, v.disk("image"), os.Getenv("GODWIT_GUEST"), segments, v.folder+"/clh.sock")
}

func netDevice(mac string) string {
	return fmt.Sprintf(`{
		"iommu": false, "ip": "192.168.249.1", "mac": %q, "mask": "255.255.255.0", "num_queues": 2,
		"offload_csum": true, "offload_tso": true, "offload_ufo": true, "queue_size": 256,
		"vhost_mode": "Client", "vhost_user": false
	}`, mac)
}

func (v *vmm) hotDisk(name string) string {
	return fmt.Sprintf(`{
		"backing_files": false, "direct": false, "image_type": "Raw", "iommu": false, "num_queues": 1,
		"path": %q, "queue_size": 1024, "readonly": false, "sparse": true, "vhost_user": false
	}`, v.disk(name))
}

// boot is the start of a sandbox.
func (v *vmm) boot(config string, connection *net.UnixConn, devices map[string]*os.File) {
	v.t.Helper()
	v.must("CreateVM", config)
	v.info("Created")
	for mac, tap := range devices {
		if response := v.addNet(connection, netDevice(mac), tap); response.StatusCode != 204 {
			v.t.Fatalf("vm.add-net: %v", response)
		}
	}
	v.must("BootVM", "")
	v.info("Running")
}

func TestKataRunsASandbox(t *testing.T) {
	v := start(t)
	first, second := openTap(t), openTap(t)
	v.boot(v.sandbox(false), v.dial(), map[string]*os.File{"2e:89:a8:e4:92:01": first})
	if count := v.vcpus(); count != 1 {
		t.Fatalf("%d vCPUs", count)
	}
	v.reads("_disk0")

	// When a network device is hot-plugged, Kata sends all that it has sent before once more.
	connection := v.dial()
	for index, tap := range []*os.File{first, second} {
		mac := fmt.Sprintf("2e:89:a8:e4:92:%02x", index+1)
		response := v.addNet(connection, netDevice(mac), tap)
		if response.StatusCode != 200 {
			text, _ := io.ReadAll(response.Body)
			t.Fatalf("vm.add-net: %v: %s", response, text)
		}
		var place struct{ Bdf string }
		noError(t, json.NewDecoder(response.Body).Decode(&place))
		if !slot.MatchString(place.Bdf) {
			t.Fatalf("'%s' is no place that Kata takes", place.Bdf)
		}
	}

	added := v.must("VmAddDiskPut", v.hotDisk("volume"))
	if bdf, _ := added["bdf"].(string); !slot.MatchString(bdf) {
		t.Fatalf("%v is no place that Kata takes", added)
	}
	v.must("VmRemoveDevicePut", fmt.Sprintf(`{"id": %q}`, added["id"]))
	v.refused("VmAddDevicePut", `{"path": "/sys/bus/pci/devices/0000:ff:1f.7", "iommu": false}`, 500, "0000:ff:1f.7")

	info := v.info("Running")
	if size := at(t, info, "config", "memory", "hotplug_size"); size != float64(4<<30) {
		t.Fatalf("hotplug_size is %v", size)
	}
	v.must("VmResizePut", `{"desired_ram": 402653184}`)
	if size := v.info("Running")["memory_actual_size"]; size != float64(384<<20) {
		t.Fatalf("memory_actual_size is %v", size)
	}
	if boot := at(t, info, "config", "cpus", "boot_vcpus"); boot != float64(1) {
		t.Fatalf("boot_vcpus is %v", boot)
	}
	v.must("VmResizePut", `{"desired_vcpus": 3}`)
	if count := v.vcpus(); count != 3 {
		t.Fatalf("%d vCPUs", count)
	}

	v.must("PauseVM", "")
	v.info("Paused")
	v.must("ResumeVM", "")
	v.info("Running")
	v.reads("_disk0")
	v.must("VmmPingGet", "")
	v.must("ShutdownVMM", "")
	v.ends()
}

// With `enable_iommu` Kata has segment 0 behind the virtual IOMMU, which is refused by name.
func TestKatasIommuIsRefused(t *testing.T) {
	v := start(t)
	v.refused("CreateVM", v.sandbox(true), 400, "segment 0 has the IOMMU itself")
	v.must("CreateVM", v.sandbox(false))
	v.must("ShutdownVMM", "")
	v.ends()
}

// Each call of Kata has a second, and the whole start ten.
func TestKataIsAnsweredInTime(t *testing.T) {
	v := start(t)
	began := time.Now()
	v.boot(v.sandbox(false), v.dial(), nil)
	if took := time.Since(began); took > 10*time.Second {
		t.Fatalf("the start took %v", took)
	}
	for _, method := range []string{"VmmPingGet", "VmInfoGet", "PauseVM", "ResumeVM"} {
		if _, _, err := v.call(method, "", time.Second); err != nil {
			t.Fatalf("%s: %v", method, err)
		}
	}
	if _, _, err := v.call("VmResizePut", `{"desired_vcpus": 2}`, time.Second); err != nil {
		t.Fatalf("VmResizePut: %v", err)
	}
	if _, _, err := v.call("ShutdownVMM", "", 3*time.Second); err != nil {
		t.Fatalf("ShutdownVMM: %v", err)
	}
	v.ends()
}
