package devenv

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"sort"
	"strconv"
	"syscall"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
)

// embeddedMajor is the version that is downloaded when none is installed.
const embeddedMajor = 18

// postgresBin finds the folder of initdb and postgres: PG_BIN, PATH, Debian's
// folders, and then the download of embedded-postgres. major 0 takes any.
func postgresBin(ctx context.Context, major int, say func(string, ...any)) (string, int, error) {
	var folders []string
	if dir := os.Getenv("PG_BIN"); dir != "" {
		folders = append(folders, dir)
	}
	if p, err := exec.LookPath("postgres"); err == nil {
		if p, err = filepath.EvalSymlinks(p); err == nil {
			folders = append(folders, filepath.Dir(p))
		}
	}
	debian, _ := filepath.Glob("/usr/lib/postgresql/*/bin")
	sort.Slice(debian, func(i, j int) bool { return debianMajor(debian[i]) > debianMajor(debian[j]) })
	for _, dir := range append(folders, debian...) {
		if v := binVersion(ctx, dir); v > 0 && (major == 0 && v >= 15 || v == major) {
			return dir, v, nil
		}
	}
	if major != 0 && major != embeddedMajor {
		return "", 0, fmt.Errorf("PostgreSQL %d is not installed: install it (Debian: apt-get install postgresql-%d) or set PG_BIN to the folder of its initdb and postgres", major, major)
	}
	dir, err := embeddedBin(say)
	if err != nil {
		return "", 0, fmt.Errorf("no PostgreSQL found: install it, set PG_BIN to the folder of initdb and postgres, or allow the download of embedded PostgreSQL %d: %w", embeddedMajor, err)
	}
	return dir, binVersion(ctx, dir), nil
}

func debianMajor(dir string) int {
	n, _ := strconv.Atoi(filepath.Base(filepath.Dir(dir)))
	return n
}

var versionNumber = regexp.MustCompile(`\(PostgreSQL\) (\d+)`)

// binVersion is the major version of the server in a folder, 0 if it has none.
func binVersion(ctx context.Context, dir string) int {
	if _, err := os.Stat(filepath.Join(dir, "initdb")); err != nil {
		return 0
	}
	out, err := exec.CommandContext(ctx, filepath.Join(dir, "postgres"), "--version").Output()
	if err != nil {
		return 0
	}
	m := versionNumber.FindSubmatch(out)
	if m == nil {
		return 0
	}
	n, _ := strconv.Atoi(string(m[1]))
	return n
}

// cacheDir keeps downloads. As root it is a place that other users can enter,
// since the server runs as one.
func cacheDir() (string, error) {
	if os.Geteuid() == 0 {
		dir := "/var/cache/kafkaonce"
		return dir, os.MkdirAll(dir, 0o755) //nolint:gosec // the server's user must enter it
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	dir = filepath.Join(dir, "kafkaonce")
	return dir, os.MkdirAll(dir, 0o755) //nolint:gosec // holds downloads only
}

// embeddedBin downloads PostgreSQL once. Two processes at once may both
// download; the one that is first wins.
func embeddedBin(say func(string, ...any)) (string, error) {
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	final := filepath.Join(cache, fmt.Sprintf("postgres-%s", embeddedpostgres.V18))
	bin := filepath.Join(final, "bin")
	if _, err := os.Stat(filepath.Join(bin, "initdb")); err == nil {
		return bin, nil
	}
	say("downloading PostgreSQL %s (once)", embeddedpostgres.V18)
	tmp, err := os.MkdirTemp(cache, "unpack-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	port, err := freePort()
	if err != nil {
		return "", err
	}
	unpacked := filepath.Join(tmp, "pg")
	cfg := embeddedpostgres.DefaultConfig().Version(embeddedpostgres.V18).CachePath(filepath.Join(tmp, "cache")).
		BinariesPath(unpacked).RuntimePath(filepath.Join(tmp, "run")).DataPath(filepath.Join(tmp, "data")).
		Port(uint32(port)).Logger(io.Discard) //nolint:gosec // a port fits
	if mirror := os.Getenv("KAFKAONCE_MAVEN_REPO"); mirror != "" {
		cfg = cfg.BinaryRepositoryURL(mirror)
	}
	// The library has no way to only unpack: it also starts a server. As root
	// initdb refuses, and by then the files are there.
	db := embeddedpostgres.NewDatabase(cfg)
	startErr := db.Start()
	if startErr == nil {
		_ = db.Stop()
	}
	if _, err := os.Stat(filepath.Join(unpacked, "bin", "initdb")); err != nil {
		return "", startErr
	}
	if err := readable(unpacked); err != nil {
		return "", err
	}
	if err := os.Rename(unpacked, final); err != nil {
		if _, e := os.Stat(filepath.Join(bin, "initdb")); e != nil {
			return "", err
		}
	}
	return bin, nil
}

// readable lets every user read and enter what was unpacked.
func readable(root string) error {
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Type()&fs.ModeSymlink != 0 {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		mode := info.Mode().Perm() | 0o444
		if d.IsDir() || mode&0o100 != 0 {
			mode |= 0o111
		}
		return os.Chmod(path, mode)
	})
}

// unprivileged is whom a server runs as when we are root, nil otherwise.
func unprivileged() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		if err1 == nil && err2 == nil {
			return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
		}
	}
	return nil, fmt.Errorf("PostgreSQL does not run as root, and there is no user postgres or nobody: create one, or run as a normal user")
}
