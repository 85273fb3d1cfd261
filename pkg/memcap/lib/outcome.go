// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
)

// Outcome is what the program hold came to for one allocation of a container.
type Outcome struct {
	// Container is the runtime's ID of the container, and Key the allocation's.
	Container, Key string
	// Cgroup is the container's path below the root of the unified hierarchy. It is empty if the
	// program did not find it.
	Cgroup string
	// Limits are what the driver has confirmed.
	Limits []Held
	// Failed is why the container has no limit in the driver, or empty if it has.
	Failed string
	// At is when the program wrote this.
	At time.Time
}

// Held is a limit that the driver has read back, in bytes.
type Held struct {
	GPU gpu.UUID
	// Own is the allocation's cap. Sum is the limit that was set: it has the container's other
	// allocations on this GPU, too.
	Own, Sum uint64
}

const (
	// outcomesName is the directory of all outcomes, below the directory cap of the state directory:
	// set/<container>/<key>.
	outcomesName = "set"
	// mostOutcome bounds a file, and mostOutcomes how many are read.
	mostOutcome, mostOutcomes = 64 << 10, 10_000
	outcomeHead               = "limit v1"
	// outcomeStays is for how long Sweep keeps an outcome that was just written: its container may
	// not run yet.
	outcomeStays = 10 * time.Minute
)

// OutcomesDir returns the directory to which the program hold writes. state is the agent's state
// directory.
func OutcomesDir(state string) string { return filepath.Join(state, "cap", outcomesName) }

// Outcomes reads what the program hold has written. It keeps what it has read: the program writes a
// file at most twice, at the start of a container. It is for one goroutine.
type Outcomes struct {
	dir  string
	read map[string]readOutcome // by path below dir
}

type readOutcome struct {
	Outcome
	mark outcomeMark
}

// outcomeMark identifies the content of a file: the program replaces files.
type outcomeMark struct {
	inode   uint64
	size    int64
	changed unix.Timespec
}

// OpenOutcomes reads the outcomes below the agent's state directory. The directory need not be there.
func OpenOutcomes(state string) *Outcomes {
	return &Outcomes{dir: OutcomesDir(state), read: map[string]readOutcome{}}
}

// All returns the outcomes of all containers, in no order. Of files that cannot be read it returns
// the errors, beside the outcomes of the others.
func (o *Outcomes) All() ([]Outcome, error) {
	containers, err := names(o.dir)
	if err != nil {
		return nil, fmt.Errorf("read the outcomes of hooks: %w", err)
	}
	var out []Outcome
	var errs []error
	now := make(map[string]readOutcome, len(o.read))
	for _, id := range containers {
		keys, err := names(filepath.Join(o.dir, id))
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for _, key := range keys {
			if strings.HasPrefix(key, ".") {
				continue // not complete yet
			}
			if len(now) >= mostOutcomes {
				return out, errors.Join(append(errs, fmt.Errorf("read the outcomes of hooks: %s has more than %d",
					o.dir, mostOutcomes))...)
			}
			is, err := o.one(id, key)
			if errors.Is(err, fs.ErrNotExist) {
				continue // it was swept
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("read the outcome of allocation %s for container %s: %w", key, id, err))
				continue
			}
			now[id+"/"+key] = is
			out = append(out, is.Outcome)
		}
	}
	o.read = now
	return out, errors.Join(errs...)
}

func (o *Outcomes) one(id, key string) (readOutcome, error) {
	path := filepath.Join(o.dir, id, key)
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return readOutcome{}, err
	}
	mark := outcomeMark{st.Ino, st.Size, st.Ctim}
	if known, ok := o.read[id+"/"+key]; ok && known.mark == mark {
		return known, nil
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return readOutcome{}, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, mostOutcome+1))
	if err != nil {
		return readOutcome{}, err
	}
	is := readOutcome{mark: mark}
	if is.Outcome, err = parseOutcome(text); err != nil {
		return readOutcome{}, err
	}
	is.Container, is.Key, is.At = id, key, time.Unix(st.Mtim.Unix())
	return is, nil
}

// parseOutcome reads a file of the program:
//
//	limit v1
//	cgroup /kubepods/burstable/pod…/…
//	gpu GPU-… <own> <sum> <confirmed>
//	done
//
// The last line is "failed" and a sentence otherwise.
func parseOutcome(text []byte) (out Outcome, err error) {
	if len(text) > mostOutcome {
		return out, fmt.Errorf("it has more than %d bytes: %w", mostOutcome, gpu.ErrInvalid)
	}
	head, rest, _ := strings.Cut(string(text), "\n")
	if head != outcomeHead {
		return out, fmt.Errorf("it begins with %q, want %q: %w", head, outcomeHead, gpu.ErrInvalid)
	}
	complete := false
	for line := range strings.Lines(rest) {
		word, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		switch {
		case complete || !strings.HasSuffix(line, "\n"):
			return out, fmt.Errorf("line %q: %w", line, gpu.ErrInvalid)
		case word == "cgroup":
			out.Cgroup = value
		case word == "gpu":
			l, confirmed, err := parseHeld(value)
			if err != nil {
				return out, err
			}
			// The driver may round down, but not up.
			if confirmed > 0 && confirmed <= l.Sum {
				out.Limits = append(out.Limits, l)
			}
		case word == "failed" && value != "":
			out.Failed, complete = value, true
		case word == "done" && value == "":
			complete = true
		default:
			return out, fmt.Errorf("line %q: %w", line, gpu.ErrInvalid)
		}
	}
	if !complete {
		return out, fmt.Errorf("it has no end: %w", gpu.ErrInvalid)
	}
	if out.Failed != "" {
		out.Limits = nil
	}
	return out, nil
}

func parseHeld(text string) (l Held, confirmed uint64, err error) {
	fields := strings.Split(text, " ")
	if len(fields) != 4 || fields[0] == "" {
		return l, 0, fmt.Errorf("limit %q: want a GPU and three amounts: %w", text, gpu.ErrInvalid)
	}
	var amounts [3]uint64
	for i := range amounts {
		if amounts[i], err = strconv.ParseUint(fields[i+1], 10, 64); err != nil {
			return l, 0, fmt.Errorf("limit %q: %w: %w", text, gpu.ErrInvalid, err)
		}
	}
	return Held{GPU: gpu.UUID(fields[0]), Own: amounts[0], Sum: amounts[1]}, amounts[2], nil
}

// Sweep removes the outcomes of containers that are gone. gone reports that of a container's cgroup.
// What was written a short while ago stays.
func (o *Outcomes) Sweep(now time.Time, gone func(container, cgroup string) bool) error {
	containers, err := names(o.dir)
	if err != nil {
		return fmt.Errorf("remove outcomes of hooks: %w", err)
	}
	cgroups := map[string]string{}
	for _, is := range o.read {
		if is.Cgroup != "" {
			cgroups[is.Container] = is.Cgroup
		}
	}
	var errs []error
	for _, id := range containers {
		dir := filepath.Join(o.dir, id)
		info, err := os.Lstat(dir)
		if err != nil || now.Sub(info.ModTime()) < outcomeStays || !gone(id, cgroups[id]) {
			continue
		}
		if err := os.RemoveAll(dir); err != nil {
			errs = append(errs, fmt.Errorf("remove the outcome of a hook: %w", err))
		}
	}
	return errors.Join(errs...)
}

// names lists a directory, which may be missing.
func names(dir string) ([]string, error) {
	f, err := os.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer f.Close()
	all, err := f.Readdirnames(mostOutcomes)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return all, err
}
