// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// change is why a stage has to run again.
type change struct {
	stage string
	why   string
}

// changedSince names the stages of a list of which an input or a command is not what it was
// at a commit, in the list's order. then are the commands of that commit's stages, as
// commandsOf gives them; a stage that is not among them has changed.
func (c *checkout) changedSince(ctx context.Context, commit string, list []stage, then map[string]string) ([]change, error) {
	files, err := changedFiles(ctx, c.root, commit)
	if err != nil {
		return nil, err
	}
	now := commandsOf(list)
	var changes []change
	for _, s := range list {
		inputs := c.inputs(s, list)
		var found []string
		for _, f := range files {
			// Of a file that is gone, the package it belonged to is known by its directory.
			if inputs[f] || c.goneFrom(f, inputs) {
				found = append(found, f)
			}
		}
		was, known := then[s.name]
		switch {
		case len(found) > 0:
			why := found[0]
			if len(found) > 1 {
				why = fmt.Sprintf("%s and %d more", why, len(found)-1)
			}
			changes = append(changes, change{s.name, fmt.Sprintf("%s, of %d inputs", why, len(inputs))})
		case !known:
			changes = append(changes, change{s.name, "its commands at that commit are not known"})
		case was != now[s.name]:
			changes = append(changes, change{s.name, "its commands"})
		}
	}
	return changes, nil
}

// goneFrom says whether a file that is not there any more was in a directory of which
// other files are inputs.
func (c *checkout) goneFrom(file string, inputs map[string]bool) bool {
	if _, there := slices.BinarySearch(c.files, file); there {
		return false
	}
	for input := range inputs {
		if filepath.Dir(input) == filepath.Dir(file) {
			return true
		}
	}
	return false
}

// changedFiles are those that differ between a commit and the checkout, those of its own
// that git does not know yet included, sorted.
func changedFiles(ctx context.Context, root, commit string) ([]string, error) {
	var all []string
	for _, args := range [][]string{
		{"diff", "--name-only", "--no-renames", "-z", commit, "--"},
		{"ls-files", "--others", "--exclude-standard", "-z"},
	} {
		out, err := git(ctx, root, args...)
		if err != nil {
			return nil, fmt.Errorf("find what has changed since %s: %w", commit, err)
		}
		for name := range bytes.SplitSeq(out, []byte{0}) {
			if len(name) > 0 {
				all = append(all, string(name))
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

func git(ctx context.Context, root string, args ...string) ([]byte, error) {
	out, err := exec.CommandContext(ctx, "git", append([]string{"-C", root}, args...)...).Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil, fmt.Errorf("git %s: %w: %s", args[0], err, bytes.TrimSpace(exit.Stderr))
	}
	return out, err
}

// commandsOf is the text of each stage's commands, by its name.
func commandsOf(list []stage) map[string]string {
	all := map[string]string{}
	for _, s := range list {
		var text strings.Builder
		for _, c := range s.commands {
			fmt.Fprintf(&text, "%s: %s %s\n", c.in, strings.Join(c.env, " "), strings.Join(c.args, " "))
		}
		all[s.name] = text.String()
	}
	return all
}

// commandsAt are the commands of a commit's stages in their full form. Its own program
// knows them; one that is too old to tell gives none.
func commandsAt(ctx context.Context, root, commit string, w io.Writer) (map[string]string, error) {
	dir, err := os.MkdirTemp("", "stages-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	tree := filepath.Join(dir, "tree")
	if _, err := git(ctx, root, "worktree", "add", "--detach", tree, commit); err != nil {
		return nil, fmt.Errorf("check out %s: %w", commit, err)
	}
	defer func() { _, _ = git(context.WithoutCancel(ctx), root, "worktree", "remove", "--force", tree) }()
	cmd := exec.CommandContext(ctx, "go", "run", "./tests/stages", "--commands")
	cmd.Dir = tree
	out, err := cmd.Output()
	all := map[string]string{}
	if err == nil {
		err = json.Unmarshal(out, &all)
	}
	if err != nil {
		fmt.Fprintf(w, "the stages of %s do not tell their commands (%v): each counts as changed\n", commit, err)
		return nil, nil
	}
	return all, nil
}
