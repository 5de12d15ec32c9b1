// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

package clients

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"os"
	"strconv"
	"syscall"
	"testing"
	"unsafe"
)

// openTap makes a tap with one queue, of the kind that Kata opens; its interface goes with its last descriptor.
func openTap(t *testing.T) *os.File {
	t.Helper()
	fd, err := syscall.Open("/dev/net/tun", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("a tap cannot be made here: %v", err)
	}
	file := os.NewFile(uintptr(fd), "tap")
	t.Cleanup(func() { file.Close() })
	var request [40]byte
	flags := syscall.IFF_TAP | syscall.IFF_NO_PI | syscall.IFF_VNET_HDR | 0x100 // IFF_MULTI_QUEUE
	binary.LittleEndian.PutUint16(request[16:], uint16(flags))
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), syscall.TUNSETIFF, uintptr(unsafe.Pointer(&request[0])))
	if errno != 0 {
		t.Skipf("a tap cannot be made here: %v", errno)
	}
	return file
}

// addNet makes the one request that the client cannot make, as Kata does: written by net/http/httputil, and sent
// in one message with the taps.
func (v *vmm) addNet(connection *net.UnixConn, body string, taps ...*os.File) *http.Response {
	v.t.Helper()
	request, err := http.NewRequest(http.MethodPut, "http://localhost/api/v1/vm.add-net", bytes.NewBufferString(body))
	noError(v.t, err)
	request.Header.Set("Accept", "application/json")
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Content-Length", strconv.Itoa(len(body)))
	message, err := httputil.DumpRequest(request, true)
	noError(v.t, err)
	var numbers []int
	for _, tap := range taps {
		numbers = append(numbers, int(tap.Fd()))
	}
	rights := syscall.UnixRights(numbers...)
	sent, sentRights, err := connection.WriteMsgUnix(message, rights, nil)
	noError(v.t, err)
	if sent != len(message) || sentRights != len(rights) {
		v.t.Fatalf("%d of %d bytes were sent", sent, len(message))
	}
	response, err := http.ReadResponse(bufio.NewReader(connection), request)
	noError(v.t, err)
	answer, err := io.ReadAll(response.Body)
	noError(v.t, err)
	noError(v.t, response.Body.Close())
	response.Body = io.NopCloser(bytes.NewReader(answer))
	v.note(request, response)
	return response
}

// dial is a connection beside those of the client.
func (v *vmm) dial() *net.UnixConn {
	v.t.Helper()
	connection, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: v.socket, Net: "unix"})
	noError(v.t, err)
	v.t.Cleanup(func() { connection.Close() })
	return connection
}
