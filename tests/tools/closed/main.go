// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"

	"github.com/nishanths/exhaustive"
	"golang.org/x/tools/go/analysis"
	"golang.org/x/tools/go/analysis/unitchecker"
)

// open are the types that are no closed sets: those of others, and of our own what happens,
// of which each place looks at what concerns it.
const open = `^(debug/elf|reflect)\.|^(github\.com|go\.yaml\.in|k8s\.io)/|\.(Event|EventKind|Form|Level|Op)$`

func main() {
	flags := &exhaustive.Analyzer.Flags
	for name, value := range map[string]string{"check": "switch,map", "explicit-exhaustive-map": "true", "ignore-enum-types": open} {
		if err := flags.Set(name, value); err != nil {
			panic(err)
		}
	}
	check := *exhaustive.Analyzer
	check.Run = func(pass *analysis.Pass) (any, error) {
		report := pass.Report
		pass.Report = func(d analysis.Diagnostic) {
			if !strings.HasSuffix(pass.Fset.File(d.Pos).Name(), "_test.go") {
				report(d)
			}
		}
		return exhaustive.Analyzer.Run(pass)
	}
	unitchecker.Main(&check)
}
