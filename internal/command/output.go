// SPDX-License-Identifier: Apache-2.0

package command

import (
	"encoding/json"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// PrintJSON writes a value as indented JSON, with a line break at its end. Its errors are those of the
// encoder and of out.
func PrintJSON(out io.Writer, v any) error {
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// Terminal is what an output can show. The zero value is an output that is no terminal, with UTF-8.
type Terminal struct {
	// Width is in columns: the variable COLUMNS, or else the terminal's. It is 0 if neither tells it.
	Width int
	// Color is true if out is a terminal, and neither NO_COLOR nor TERM=dumb is set.
	Color bool
	// ASCII is true if the locale has another encoding than UTF-8.
	ASCII bool
}

// TerminalOf returns what out can show, by the process's environment.
func TerminalOf(out io.Writer) (t Terminal) {
	t.Width, _ = strconv.Atoi(os.Getenv("COLUMNS"))
	locale := os.Getenv("LC_ALL") + os.Getenv("LC_CTYPE") + os.Getenv("LANG")
	t.ASCII = locale != "" && !strings.Contains(strings.ToUpper(strings.ReplaceAll(locale, "-", "")), "UTF8")
	if f, ok := out.(*os.File); ok {
		// This ioctl succeeds only for a terminal.
		size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
		t.Color = err == nil && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
		if err == nil && t.Width == 0 {
			t.Width = int(size.Col)
		}
	}
	return t
}
