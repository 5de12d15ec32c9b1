// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

// Package clients drives the VMM with a client that openapi-generator has made for Go, as Kata's runtime does.
//
// The client is in the folder `client`, where scripts/lib/client-tests puts it. It is called by the names of its
// methods: bodies are given as JSON, read into the client's own types and written by it, and answers are read by
// it. So one test drives every client of that generator, whatever names it gives to types.
package clients

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	api "godwit.test/clients/client"
)

// How long a condition may take that normally takes milliseconds; a loaded machine is slow.
const patience = 30 * time.Second

// A VMM, and a client of it.
type vmm struct {
	t       *testing.T
	command *exec.Cmd
	ended   chan struct{}
	folder  string
	socket  string
	service reflect.Value
	mutex   sync.Mutex
	asked   []string
	// Names of the client's methods that were called.
	called map[string]bool
}

// start runs the program as Kata does, with the socket alone, and waits until it answers a ping.
func start(t *testing.T) *vmm {
	program := os.Getenv("GODWIT_VMM")
	if program == "" || os.Getenv("GODWIT_GUEST") == "" {
		t.Fatal("GODWIT_VMM and GODWIT_GUEST name the program and the test guest")
	}
	// Not t.TempDir(), whose paths are longer than those of sockets may be.
	folder, err := os.MkdirTemp("", "godwit-go-")
	noError(t, err)
	t.Cleanup(func() { os.RemoveAll(folder) })
	v := &vmm{t: t, ended: make(chan struct{}), folder: folder, called: map[string]bool{}}
	v.socket = filepath.Join(folder, "clh-api.sock")
	output := filepath.Join(folder, "output")
	file, err := os.Create(output)
	noError(t, err)
	v.command = exec.Command(program, "--api-socket", v.socket)
	v.command.Stdout, v.command.Stderr = file, file
	noError(t, v.command.Start())
	noError(t, file.Close())
	go func() {
		_ = v.command.Wait()
		close(v.ended)
	}()
	t.Cleanup(func() {
		_ = v.command.Process.Kill()
		<-v.ended
		if t.Failed() {
			text, _ := os.ReadFile(output)
			t.Logf("the program said:\n%s", text)
		}
		t.Logf("requests: %s", strings.Join(v.asked, ", "))
	})
	transport := &http.Transport{
		DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", v.socket) },
	}
	t.Cleanup(transport.CloseIdleConnections)
	configuration := api.NewConfiguration()
	configuration.HTTPClient = &http.Client{Transport: &noted{v, transport}}
	v.service = reflect.ValueOf(api.NewAPIClient(configuration).DefaultApi)
	v.waitFor("a ping", func() bool {
		_, _, err := v.call("VmmPingGet", "", time.Second)
		return err == nil
	})
	return v
}

// What the client sends, noted with the status of the answer.
type noted struct {
	vmm       *vmm
	transport http.RoundTripper
}

func (n *noted) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := n.transport.RoundTrip(request)
	if err == nil {
		n.vmm.note(request, response)
	}
	return response, err
}

func (v *vmm) note(request *http.Request, response *http.Response) {
	v.mutex.Lock()
	defer v.mutex.Unlock()
	asked := fmt.Sprintf("%s %d", strings.TrimPrefix(request.URL.Path, "/api/v1/"), response.StatusCode)
	// What is asked over and over until something holds is one.
	if len(v.asked) == 0 || v.asked[len(v.asked)-1] != asked {
		v.asked = append(v.asked, asked)
	}
}

// call makes a request by the client's method of that name. The answer is as the client has read it, or nil.
func (v *vmm) call(method, body string, limit time.Duration) (interface{}, *http.Response, error) {
	v.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	function := v.service.MethodByName(method)
	if !function.IsValid() {
		v.t.Fatalf("the client has no method %s", method)
	}
	v.mutex.Lock()
	v.called[method] = true
	v.mutex.Unlock()
	request := function.Call([]reflect.Value{reflect.ValueOf(ctx)})[0]
	if body != "" {
		request = v.withBody(request, body)
	}
	results := request.MethodByName("Execute").Call(nil)
	err, _ := results[len(results)-1].Interface().(error)
	response, _ := results[len(results)-2].Interface().(*http.Response)
	if len(results) == 3 {
		return results[0].Interface(), response, err
	}
	return nil, response, err
}

// has tells whether the client has a method of that name.
func (v *vmm) has(method string) bool { return v.service.MethodByName(method).IsValid() }

// methods are the names of all requests that the client can make.
func (v *vmm) methods() []string {
	var names []string
	for i := 0; i < v.service.NumMethod(); i++ {
		name := v.service.Type().Method(i).Name
		// Each has another by which the request is carried out.
		if !strings.HasSuffix(name, "Execute") {
			names = append(names, name)
		}
	}
	return names
}

// withBody reads the body into the type that the request takes; a field that is not in it is not sent.
func (v *vmm) withBody(request reflect.Value, body string) reflect.Value {
	v.t.Helper()
	for i := 0; i < request.NumMethod(); i++ {
		name := request.Type().Method(i).Name
		if name == "Execute" {
			continue
		}
		value := reflect.New(request.Method(i).Type().In(0))
		if err := json.Unmarshal([]byte(body), value.Interface()); err != nil {
			v.t.Fatalf("%s has no room for %s: %v", name, body, err)
		}
		return request.Method(i).Call([]reflect.Value{value.Elem()})[0]
	}
	v.t.Fatalf("%v takes no body", request.Type())
	return request
}

// must makes a request that succeeds; the answer is as the client writes it in JSON again.
func (v *vmm) must(method, body string) map[string]interface{} {
	v.t.Helper()
	answer, response, err := v.call(method, body, patience)
	if err != nil {
		v.t.Fatalf("%s: %v: %s", method, err, reasons(err))
	}
	if response.StatusCode != 200 && response.StatusCode != 204 {
		v.t.Fatalf("%s: status %d", method, response.StatusCode)
	}
	return object(v.t, answer)
}

// refused makes a request that fails, and has a word in the reasons.
func (v *vmm) refused(method, body string, status int, word string) {
	v.t.Helper()
	_, response, err := v.call(method, body, patience)
	if err == nil || response == nil {
		v.t.Fatalf("%s: %v, %v: it should be refused", method, response, err)
	}
	if response.StatusCode != status {
		v.t.Fatalf("%s: status %d in the place of %d: %s", method, response.StatusCode, status, reasons(err))
	}
	var sentences []string
	if err := json.Unmarshal([]byte(reasons(err)), &sentences); err != nil {
		v.t.Fatalf("%s: %v: '%s' is no list of sentences", method, err, reasons(err))
	}
	if !strings.Contains(strings.Join(sentences, ": "), word) {
		v.t.Fatalf("%s: '%s' is not in %q", method, word, sentences)
	}
}

// info is the VM, which has to be in that state.
func (v *vmm) info(state string) map[string]interface{} {
	v.t.Helper()
	info := v.must("VmInfoGet", "")
	if info["state"] != state {
		v.t.Fatalf("the VM is %v, and not %s", info["state"], state)
	}
	return info
}

// reads waits until the guest has read from that disk, again if it has before.
func (v *vmm) reads(disk string) {
	v.t.Helper()
	count := func() float64 {
		counters, _ := v.must("VmCountersGet", "")[disk].(map[string]interface{})
		number, _ := counters["read_ops"].(float64)
		return number
	}
	before := count()
	v.waitFor("the guest's reads", func() bool { return count() > before })
}

var vcpuName = regexp.MustCompile(`^vcpu\d+$`)

// vcpus are the threads that Kata takes for vCPUs.
func (v *vmm) vcpus() int {
	v.t.Helper()
	names, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/comm", v.command.Process.Pid))
	noError(v.t, err)
	count := 0
	for _, name := range names {
		if text, err := os.ReadFile(name); err == nil && vcpuName.Match(bytes.TrimSpace(text)) {
			count++
		}
	}
	return count
}

// disk makes an image of a MiB.
func (v *vmm) disk(name string) string {
	v.t.Helper()
	path := filepath.Join(v.folder, name)
	noError(v.t, os.WriteFile(path, make([]byte, 1<<20), 0o600))
	return path
}

// ends waits for the end of the program, which it has been asked for.
func (v *vmm) ends() {
	v.t.Helper()
	select {
	case <-v.ended:
	case <-time.After(patience):
		v.t.Fatal("the program does not end")
	}
	if code := v.command.ProcessState.ExitCode(); code != 0 {
		v.t.Fatalf("exit code %d", code)
	}
}

func (v *vmm) waitFor(what string, holds func() bool) {
	v.t.Helper()
	for until := time.Now().Add(patience); !holds(); time.Sleep(10 * time.Millisecond) {
		select {
		case <-v.ended:
			v.t.Fatalf("%s: the program has ended", what)
		default:
		}
		if time.Now().After(until) {
			v.t.Fatalf("%s: not within %v", what, patience)
		}
	}
}

// reasons is the body of an answer that the client takes for an error.
func reasons(err error) string {
	if refusal, ok := err.(interface{ Body() []byte }); ok {
		return string(refusal.Body())
	}
	return ""
}

// object is a value of the client as JSON; nothing for an answer without a body.
func object(t *testing.T, value interface{}) map[string]interface{} {
	t.Helper()
	text, err := json.Marshal(value)
	noError(t, err)
	var fields map[string]interface{}
	noError(t, json.Unmarshal(text, &fields))
	return fields
}

// at is the value at a path of names and numbers.
func at(t *testing.T, value interface{}, path ...interface{}) interface{} {
	t.Helper()
	for _, step := range path {
		switch step := step.(type) {
		case string:
			fields, _ := value.(map[string]interface{})
			value = fields[step]
		case int:
			items, _ := value.([]interface{})
			if step >= len(items) {
				t.Fatalf("there is no item %d in %v", step, items)
			}
			value = items[step]
		}
	}
	return value
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
