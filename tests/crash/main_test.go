// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"testing"
)

var (
	agentProgram = flag.String("agent", "", "the gpu-agent to test, nvidia-cdi-hook beside it (default: what make build makes)")
	built        = flag.Bool("built", false, "the gpu-agent that make build makes stands in the cache already")
	long         = flag.Bool("long", false, "cut each state file at every byte, and changes of the hardware at every call, not at a sample")
	seed         = flag.Uint64("seed", 1, "draws the sample of calls")
	renew        = flag.Bool("renew", false, "write the commit into the file proved, when every test has passed")
)

func TestMain(m *testing.M) {
	var err error
	switch {
	case os.Getenv(writerEnv) != "":
		err = writer(os.Getenv(writerEnv))
	default:
		flag.Parse()
		debug.SetGCPercent(400) // memory is cheaper here than the collector's time
		// Tests wait more than they work.
		err = flag.Set("test.parallel", "16")
		run := func() int {
			defer endPlane()
			return m.Run()
		}
		if err == nil && *renew {
			os.Exit(runAndRenew(run, partial()))
		}
		if err == nil {
			os.Exit(run())
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// partial says why a run does not try everything of what is in this checkout.
func partial() error {
	if testing.Short() || *built || *agentProgram != "" {
		return errors.New("a run with -short, or of a program that was there before, proves nothing of the commit")
	}
	for _, name := range []string{"test.run", "test.skip"} {
		if f := flag.Lookup(name); f != nil && f.Value.String() != "" {
			return fmt.Errorf("a run with -%s tries a part alone", strings.TrimPrefix(name, "test."))
		}
	}
	return nil
}
