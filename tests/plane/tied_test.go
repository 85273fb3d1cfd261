// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"
)

// A process outlives the thread whose goroutine asked for it: threads that enter a node's
// network end while Liqo's programs, which were started before, have to go on.
func TestTiedProcessOutlivesTheThreadThatAsked(t *testing.T) {
	cmd := exec.Command("cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	thread, err := onEndingThread(func() error { return StartTied(cmd) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	deadline := time.Now().Add(time.Minute)
	for {
		if _, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", thread)); os.IsNotExist(err) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("thread %d has not ended", thread)
		}
		time.Sleep(time.Millisecond)
	}
	if _, err := io.WriteString(in, "there\n"); err != nil {
		t.Fatalf("the process ended with the thread: %v", err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "there\n" {
		t.Errorf("the process says %q, %v", line, err)
	}
}

// onEndingThread calls f on a thread that ends afterwards.
func onEndingThread(f func() error) (thread int, err error) {
	done := make(chan struct{})
	go func() {
		runtime.LockOSThread() // and never unlocked, so the thread ends with the goroutine
		if thread = syscall.Gettid(); thread == os.Getpid() {
			// Go keeps the main thread, so another one has to do while this goroutine has it.
			thread, err = onEndingThread(f)
			runtime.UnlockOSThread()
		} else {
			err = f()
		}
		close(done)
	}()
	<-done
	return thread, err
}
