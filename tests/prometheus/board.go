// SPDX-License-Identifier: Apache-2.0

package prometheus

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Board is what the tests read of a board of Grafana's; tests/monitoring reads all of it.
type Board struct {
	UID, Title string
	Templating struct {
		List []struct {
			Name, Type string
			Definition string
		}
	}
	Panels []struct {
		Type, Title, Description string
		Targets                  []struct{ Expr string }
	}
}

// Boards are a directory's, by the paths of their files.
func Boards(dir string) (map[string]Board, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil || len(files) == 0 {
		return nil, fmt.Errorf("find boards in %s: there is none: %w", dir, err)
	}
	out := map[string]Board{}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		var b Board
		if err := json.Unmarshal(text, &b); err != nil {
			return nil, fmt.Errorf("read the board %s: %w", f, err)
		}
		out[f] = b
	}
	return out, nil
}

// Filled is a board's query with what Grafana puts in place of its variables.
func Filled(expr string) string {
	return strings.NewReplacer("$__rate_interval", "1m", "$__range", "1m", "$node", ".*", "$namespace", ".*", "$price", "2").Replace(expr)
}
