// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"

	"example.com/gpu-agent/tests/emulator/mps"
)

func main() {
	mps.Main()
	fmt.Fprintf(os.Stderr, "%s is no program of MPS: mps.LayProgram gives it their names\n", os.Args[0])
	os.Exit(2)
}
