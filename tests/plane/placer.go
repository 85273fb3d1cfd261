// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Placer is `gpu-placer run`, a process that can be stopped and killed.
type Placer struct {
	// Door and Page are the addresses of kube-scheduler's door, and of metrics and probes.
	Door, Page string
	cmd        *exec.Cmd
}

// Secured has certificates made for a door on loopback, and returns the flags of the placer
// with them, for StartPlacer.
func Secured(t testing.TB, program string) (dir string, flags []string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "door")
	if out, err := exec.Command(program, "certificates", "--out", dir, "--names", "127.0.0.1").CombinedOutput(); err != nil {
		t.Fatalf("make certificates: %v\n%s", err, out)
	}
	return dir, []string{"--tls-cert-file", filepath.Join(dir, "tls.crt"), "--tls-key-file", filepath.Join(dir, "tls.key"), "--client-ca-file", filepath.Join(dir, "ca.crt")}
}

// StartPlacer starts the program, whose door is at an address, and waits until it leads. It
// ends with the test. Without flags of [Secured] its door is open.
func (s *Server) StartPlacer(t testing.TB, program, kubeconfig, door string, args ...string) *Placer {
	t.Helper()
	p := &Placer{Door: door, Page: FreeAddress(t)}
	if !slices.Contains(args, "--client-ca-file") {
		args = append(slices.Clip(args), "--insecure-door")
	}
	p.cmd = exec.Command(program, append([]string{"run", "--kubeconfig", kubeconfig, "--listen", p.Door, "--http", p.Page}, args...)...)
	p.cmd.Stderr = t.Output()
	if err := StartTied(p.cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	s.Await(t, "the placer answers", func() error {
		_, err := p.Get("/readyz")
		return err
	})
	return p
}

// Kill ends it at once, without a word.
func (p *Placer) Kill() {
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

// End has it end as a pod does, so that it gives its lease up.
func (p *Placer) End(t testing.TB) {
	t.Helper()
	p.signal(t, syscall.SIGTERM)
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("the placer ended with %v", err)
	}
}

// Hang stops its threads, and Resume has them go on. On a busy machine a thread runs on for a
// while after SIGSTOP was sent, and answers: so Hang waits until all of them stand still.
func (p *Placer) Hang(t testing.TB) {
	t.Helper()
	p.signal(t, syscall.SIGSTOP)
	for {
		switch err := unix.Waitid(unix.P_PID, p.PID(), nil, unix.WSTOPPED|unix.WNOWAIT, nil); err {
		case nil:
			return
		case unix.EINTR:
		default:
			t.Fatalf("wait until the placer stands still: %v", err)
		}
	}
}

// Resume ends Hang.
func (p *Placer) Resume(t testing.TB) {
	t.Helper()
	p.signal(t, syscall.SIGCONT)
}

func (p *Placer) signal(t testing.TB, is syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(is); err != nil {
		t.Fatal(err)
	}
}

// PID is its process.
func (p *Placer) PID() int { return p.cmd.Process.Pid }

// Get reads one of its pages; an answer other than 200 is an error.
func (p *Placer) Get(path string) (string, error) {
	response, err := http.Get("http://" + p.Page + path)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", response.Status, body)
	}
	return string(body), err
}

// Metric is one of its series, by name and labels, which has to be there.
func (p *Placer) Metric(t testing.TB, name string) float64 {
	t.Helper()
	text, err := p.Get("/metrics")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?m)^" + regexp.QuoteMeta(name) + ` (\S+)$`).FindStringSubmatch(text)
	if m == nil {
		t.Fatalf("there is no %s in\n%s", name, text)
	}
	value, err := strconv.ParseFloat(m[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	return value
}

// FreeAddress is one of loopback that nobody had a moment ago.
func FreeAddress(t testing.TB) string {
	t.Helper()
	return fmt.Sprintf("127.0.0.1:%d", freePorts(t, 1)[0])
}

// SchedulerAsking starts the scheduler as a configuration file says that is shown to users,
// but for the placer's address, and for the certificates where its door is open; perSecond is as in
// Scheduler, and args are besides.
func (s *Server) SchedulerAsking(t testing.TB, shown, door string, perSecond int, args ...string) {
	t.Helper()
	s.schedulerAsking(t, shown, perSecond, args, func(text string) string {
		text = regexp.MustCompile(`(?m)^    enableHTTPS: true\n    tlsConfig:\n(      .*\n)+`).ReplaceAllString(text, "")
		return regexp.MustCompile(`urlPrefix: \S+`).ReplaceAllString(text, "urlPrefix: http://"+door)
	})
}

// SchedulerAskingSecurely is SchedulerAsking with the certificates of a folder that Secured has made.
func (s *Server) SchedulerAskingSecurely(t testing.TB, shown, door, dir string) {
	t.Helper()
	s.schedulerAsking(t, shown, 0, nil, func(text string) string {
		text = strings.ReplaceAll(text, "/etc/kubernetes/placer/", dir+"/")
		return regexp.MustCompile(`urlPrefix: \S+`).ReplaceAllString(text, "urlPrefix: https://"+door)
	})
}

func (s *Server) schedulerAsking(t testing.TB, shown string, perSecond int, args []string, adapt func(string) string) {
	t.Helper()
	kubeconfig := s.Kubeconfig(t, s.SchedulerAs)
	text, err := os.ReadFile(shown)
	if err != nil {
		t.Fatal(err)
	}
	text = fmt.Appendf([]byte(adapt(string(text))), "\nleaderElection: {leaderElect: false}\nclientConnection: {kubeconfig: %q%s}\n", kubeconfig, rate(perSecond))
	config := filepath.Join(t.TempDir(), "scheduler.yaml")
	if err := os.WriteFile(config, text, 0o600); err != nil {
		t.Fatal(err)
	}
	args = append([]string{"--authentication-kubeconfig", kubeconfig, "--authorization-kubeconfig", kubeconfig, "--secure-port", "0", "--config", config}, args...)
	Background(t, Program(t, "kube-scheduler"), args...)
}

func rate(perSecond int) string {
	if perSecond == 0 {
		return ""
	}
	return fmt.Sprintf(", qps: %d, burst: %[1]d", perSecond)
}
