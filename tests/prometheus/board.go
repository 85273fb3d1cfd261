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
	Panels []Panel
}

// Panel is a part of a board: a row's title, figures, lines or a table.
type Panel struct {
	Type, Title, Description string
	// GridPos is where it is, in parts of a width of 24.
	GridPos struct{ H, W, X, Y int }
	Targets []struct{ Expr, LegendFormat string }
	// Transformations leave out columns of a table, and rename others.
	Transformations []struct {
		Options struct {
			ExcludeByName map[string]bool
			RenameByName  map[string]string
		}
	}
	// FieldConfig describes its figures.
	FieldConfig struct {
		Defaults struct {
			// Unit is Grafana's word for it: empty for a plain number, percentunit, s, ops or bytes.
			Unit     string
			Decimals *int
			Min, Max *float64
			Custom   struct{ Stacking struct{ Mode string } }
		}
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
	return strings.NewReplacer("$__rate_interval", "1m", "$__range", "1m", "$node", ".*", "$namespace", ".*", "$price", "2", "$spot_price", "1").Replace(expr)
}
