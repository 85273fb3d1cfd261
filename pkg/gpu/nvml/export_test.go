// SPDX-License-Identifier: Apache-2.0

package nvml

// Function is a row of the table of functions, for tests that have the emulated driver.
type Function struct{ Symbol, Vital, Unknown string }

// Functions are all rows.
func Functions() (all []Function) {
	for _, f := range functions {
		all = append(all, Function{f.symbol, string(f.vital), f.unknown})
	}
	return all
}
