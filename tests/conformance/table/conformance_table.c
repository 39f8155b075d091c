/*
 * conformance_table.c - what of upstream's tests ran here, as a table.
 *
 *     conformance_table FOLDER       reads what the tests recorded there; 1 if a row that must run
 *                                    did not, or a record names no row
 *     conformance_table --markdown   the rows as docs/conformance.md lists them
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../rows.h"

static long checks[CONF_ROWS]; /* 0: did not run */

/* The number of records that fit no row. */
static int read_records(const char *folder)
{
    DIR *d = opendir(folder);
    if (!d) {
        fprintf(stderr, "conformance_table: cannot open %s\n", folder);
        return 1;
    }
    int bad = 0;
    for (struct dirent *e; (e = readdir(d));) {
        char path[4096], file[64], test[128];
        long n;
        if (e->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        FILE *f = fopen(path, "r");
        int got = f ? fscanf(f, "%63s %127s %ld", file, test, &n) : 0;
        if (f) fclose(f);
        int row = got == 3 ? conf_find(file, test) : -1;
        if (row < 0 || n < 1) {
            fprintf(stderr, "conformance_table: %s names no row of rows.def\n", path);
            bad++;
            continue;
        }
        checks[row] = n;
    }
    closedir(d);
    return bad;
}

static int print_table(void)
{
    int due = 0, ran = 0, parted = 0, meaningful = 0;
    const char *file = "";
    for (int i = 0; i < CONF_ROWS; i++) {
        const conf_row *r = &conf_rows[i];
        if (strcmp(file, r->file)) printf("\n%s\n", file = r->file);
        int must = conf_must_run(r->ours);
        char what[64];
        if (checks[i])
            snprintf(what, sizeof what, "%ld checks%s", checks[i],
                     r->ours == CONF_PARTED ? ", parted" : "");
        else
            snprintf(what, sizeof what, "%s", must ? "DID NOT RUN" : conf_ours_text(r->ours));
        printf("  %-72s %-6s  %-32s %s\n", r->test, conf_verdict_text(r->verdict), what, r->text);
        int counts = r->verdict == CONF_YES || r->verdict == CONF_STAR;
        meaningful += counts;
        due += counts && must;
        ran += counts && checks[i] != 0;
        parted += r->ours == CONF_PARTED && checks[i] != 0;
    }
    printf(
        "\n%d rows; %d yes and yes*, of which %d need what is not here; %d of %d ran, %d of them "
        "parted on purpose\n",
        CONF_ROWS, meaningful, meaningful - due, ran, due, parted);
    return due - ran;
}

static void print_markdown(void)
{
    const char *file = "";
    for (int i = 0; i < CONF_ROWS; i++) {
        const conf_row *r = &conf_rows[i];
        if (strcmp(file, r->file)) {
            file = r->file;
            printf(
                "\n## test_fully_shard_%s\n\n| test | verdict | here | |\n| --- | --- | --- | --- "
                "|\n",
                file);
        }
        printf("| %s.%s | %s | %s | %s |\n", r->group, r->test, conf_verdict_text(r->verdict),
               conf_ours_text(r->ours), r->text);
    }
}

int main(int argc, char **argv)
{
    if (argc == 2 && !strcmp(argv[1], "--markdown")) {
        print_markdown();
        return 0;
    }
    if (argc != 2) {
        fprintf(stderr, "usage: conformance_table FOLDER | --markdown\n");
        return 2;
    }
    int bad = read_records(argv[1]);
    return print_table() != 0 || bad != 0;
}
