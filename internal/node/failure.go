// SPDX-License-Identifier: Apache-2.0

package node

// failure is an error with a text of this package that matches a sentinel of package gpu by
// errors.Is. The sentinel's own text is about hardware, so it is not shown.
type failure struct {
	is    error // the sentinel
	text  string
	cause error // nil if the text says it all
}

func (f *failure) Error() string {
	if f.cause == nil {
		return f.text
	}
	return f.text + ": " + f.cause.Error()
}

func (f *failure) Is(target error) bool { return target == f.is }

func (f *failure) Unwrap() error { return f.cause }
