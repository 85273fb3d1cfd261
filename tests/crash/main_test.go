// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"flag"
	"fmt"
	"os"
	"testing"
)

var (
	agentProgram = flag.String("agent", "", "the gpu-agent to test, nvidia-cdi-hook beside it (default: what make build makes)")
	long         = flag.Bool("long", false, "cut each state file at every byte, and changes of the hardware at every call, not at a sample")
	seed         = flag.Uint64("seed", 1, "draws the sample of calls")
)

func TestMain(m *testing.M) {
	var err error
	switch {
	case os.Getenv(tracedEnv) != "":
		err = becomeTraced()
	case os.Getenv(writerEnv) != "":
		err = writer(os.Getenv(writerEnv))
	default:
		flag.Parse()
		// Tests wait more than they work.
		err = flag.Set("test.parallel", "16")
		if err == nil {
			os.Exit(m.Run())
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
