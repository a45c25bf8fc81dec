package archtest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/kafkaonce/kafkaonce/"

// layers says who may import whom: each package lists what it may import.
var layers = map[string][]string{
	"failure":              {},
	"schema":               {},
	"dedupe":               {"schema"},
	"outbox":               {"schema"},
	"dlq":                  {"outbox", "dedupe", "schema"},
	"consumer":             {"dlq", "outbox", "dedupe", "failure", "schema"},
	"internal/devenv":      {},
	"internal/archtest":    {},
	"cmd/example-consumer": {"consumer", "dlq", "outbox", "failure", "schema", "internal/devenv"},
	"bench":                {"consumer", "dedupe", "failure", "schema", "internal/devenv"},
	"integration":          {"consumer", "dedupe", "dlq", "outbox", "failure", "schema", "internal/devenv"},
}

type pkg struct {
	ImportPath, Dir, Doc, Name string
	Imports                    []string
	GoFiles                    []string
}

func packages(t *testing.T) (out []pkg) {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Dir,Doc,Name,Imports,GoFiles", "./...")
	cmd.Dir = "../.."
	text, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	for d := json.NewDecoder(bytes.NewReader(text)); d.More(); {
		var p pkg
		if err := d.Decode(&p); err != nil {
			t.Fatal(err)
		}
		out = append(out, p)
	}
	return out
}

// layer finds the entry of a package: its own, or that of a folder above it.
func layer(path string) (string, bool) {
	for name := strings.TrimPrefix(path, module); ; {
		if _, ok := layers[name]; ok {
			return name, true
		}
		i := strings.LastIndexByte(name, '/')
		if i < 0 {
			return name, false
		}
		name = name[:i]
	}
}

// Imports go one way.
func TestImportsGoOneWay(t *testing.T) {
	for _, p := range packages(t) {
		own, ok := layer(p.ImportPath)
		if !ok {
			t.Errorf("%s has no layer: say in this test what it may import", p.ImportPath)
			continue
		}
		for _, i := range p.Imports {
			if !strings.HasPrefix(i, module) {
				continue
			}
			if l, _ := layer(i); l != own && !slices.Contains(layers[own], l) {
				t.Errorf("%s imports %s", p.ImportPath, i)
			}
		}
	}
}

// Library packages read no environment, flags or fakes, and say what they are.
func TestLibraryPackagesArePure(t *testing.T) {
	for _, p := range packages(t) {
		own, _ := layer(p.ImportPath)
		if p.Doc == "" && len(p.GoFiles) > 0 {
			t.Errorf("%s has no package comment", p.ImportPath)
		}
		if !slices.Contains([]string{"failure", "schema", "dedupe", "outbox", "dlq", "consumer"}, own) {
			continue
		}
		for _, bad := range []string{"flag", "testing", "github.com/twmb/franz-go/pkg/kfake"} {
			if slices.Contains(p.Imports, bad) {
				t.Errorf("%s imports %s", p.ImportPath, bad)
			}
		}
		for _, f := range p.GoFiles {
			text, err := os.ReadFile(filepath.Join(p.Dir, f))
			if err != nil {
				t.Fatal(err)
			}
			if bytes.Contains(text, []byte("os.Getenv")) {
				t.Errorf("%s/%s reads the environment", p.ImportPath, f)
			}
		}
	}
}

// The library depends on what it says, and on nothing else.
func TestDependenciesOfTheLibrary(t *testing.T) {
	allowed := []string{
		"github.com/kafkaonce/kafkaonce", "github.com/twmb/franz-go", "github.com/jackc/", "github.com/cenkalti/backoff/v4",
		"github.com/klauspost/compress", "github.com/pierrec/lz4", // of franz-go
		"golang.org/x/", // of both
	}
	cmd := exec.Command("go", "list", "-deps", "./consumer")
	cmd.Dir = "../.."
	text, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	for in := bufio.NewScanner(bytes.NewReader(text)); in.Scan(); {
		path := in.Text()
		first, _, _ := strings.Cut(path, "/")
		if !strings.Contains(first, ".") {
			continue // standard library
		}
		if !slices.ContainsFunc(allowed, func(a string) bool { return strings.HasPrefix(path, a) }) {
			t.Errorf("the library depends on %s", path)
		}
	}
}

// eachFile calls f for every Go file of the repository.
func eachFile(t *testing.T, f func(path string, text []byte)) {
	t.Helper()
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") {
			return err
		}
		text, err := os.ReadFile(path)
		if err == nil {
			f(strings.TrimPrefix(path, "../../"), text)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Files stay readable, and packages are named after what they hold.
func TestFilesAreShortAndNamedAfterNouns(t *testing.T) {
	eachFile(t, func(path string, text []byte) {
		limit := 400
		if strings.HasSuffix(path, "_test.go") {
			limit = 520
		}
		if n := bytes.Count(text, []byte("\n")); n > limit {
			t.Errorf("%s has %d lines, the limit is %d: a noun is hiding in it", path, n, limit)
		}
		for _, word := range []string{"util", "utils", "common", "helper", "helpers", "types", "misc"} {
			for _, part := range strings.FieldsFunc(strings.TrimSuffix(path, ".go"), func(r rune) bool { return r == '/' || r == '_' }) {
				if part == word {
					t.Errorf("%s is called %q", path, word)
				}
			}
		}
	})
}

// Methods of the Kafka client are called only in the few files that own it.
func TestWhoTouchesTheKafkaClient(t *testing.T) {
	owners := []string{"consumer/poll.go", "consumer/client.go", "consumer/rebalance.go", "consumer/acquire.go", "consumer/commit.go", "consumer/background.go", "consumer/stall.go", "outbox/relay.go"}
	eachFile(t, func(path string, text []byte) {
		dir := filepath.Dir(path)
		if strings.HasSuffix(path, "_test.go") || !slices.Contains([]string{"consumer", "outbox", "dlq", "dedupe"}, dir) || slices.Contains(owners, path) {
			return
		}
		for _, call := range []string{".client.", "kgo.NewClient(", ".admin."} {
			if bytes.Contains(text, []byte(call)) {
				t.Errorf("%s uses %s", path, call)
			}
		}
	})
}

// Every exported symbol of the library says what it is.
func TestExportedSymbolsAreDocumented(t *testing.T) {
	for _, dir := range []string{"failure", "schema", "dedupe", "outbox", "dlq", "consumer"} {
		set := token.NewFileSet()
		files, err := filepath.Glob(filepath.Join("../..", dir, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range files {
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			file, err := parser.ParseFile(set, path, nil, parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range file.Decls {
				undocumented(d, func(name string) { t.Errorf("%s: %s has no comment", set.Position(d.Pos()), name) })
			}
		}
	}
}

func undocumented(d ast.Decl, report func(string)) {
	switch d := d.(type) {
	case *ast.FuncDecl:
		if d.Name.IsExported() && d.Doc == nil && exportedReceiver(d) {
			report(d.Name.Name)
		}
	case *ast.GenDecl:
		for _, s := range d.Specs {
			switch s := s.(type) {
			case *ast.TypeSpec:
				if s.Name.IsExported() && d.Doc == nil && s.Doc == nil {
					report(s.Name.Name)
				}
			case *ast.ValueSpec:
				if s.Names[0].IsExported() && d.Doc == nil && s.Doc == nil && s.Comment == nil {
					report(s.Names[0].Name)
				}
			}
		}
	}
}

// exportedReceiver leaves out methods of unexported types, and those that an
// interface of the standard library names.
func exportedReceiver(d *ast.FuncDecl) bool {
	if d.Recv == nil {
		return true
	}
	if slices.Contains([]string{"Error", "Unwrap", "String"}, d.Name.Name) {
		return false
	}
	e := d.Recv.List[0].Type
	if star, ok := e.(*ast.StarExpr); ok {
		e = star.X
	}
	id, ok := e.(*ast.Ident)
	return ok && id.IsExported()
}
