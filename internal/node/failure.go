// SPDX-License-Identifier: Apache-2.0

package node

// failure is an error in this package's own words that answers to a sentinel of
// package gpu, whose words are about hardware.
type failure struct {
	is    error // the sentinel
	text  string
	cause error // nil where the text says it all
}

func (f *failure) Error() string {
	if f.cause == nil {
		return f.text
	}
	return f.text + ": " + f.cause.Error()
}

func (f *failure) Is(target error) bool { return target == f.is }

func (f *failure) Unwrap() error { return f.cause }
