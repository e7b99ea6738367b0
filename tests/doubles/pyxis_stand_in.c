/*
 * A stand-in for NVIDIA's pyxis: a plugin that gives srun three of its options. Every task says what they were, and
 * then runs where it would have run without them.
 *
 *     gcc -shared -fPIC -DSLURM_VERSION=0x160508 -o pyxis.so pyxis_stand_in.c        (for Slurm 22.5.8)
 */
#include <stdio.h>

/* As in Slurm's spank.h, which machines have only with its development files. */
typedef struct spank_handle *spank_t;
struct spank_option {
    char *name, *arginfo, *usage;
    int has_arg, val;
    int (*callback)(int val, const char *given, int remote);
};
extern int spank_option_register(spank_t spank, struct spank_option *option);

const char plugin_name[] = "pyxis stand-in", plugin_type[] = "spank";
const unsigned int plugin_version = SLURM_VERSION, spank_plugin_version = 1;

static char found[3][1024];

static int note(int which, const char *given, int remote)
{
    (void)remote;
    snprintf(found[which], sizeof found[which], "%s", given ? given : "");
    return 0;
}

static struct spank_option options[] = {
    {"container-image", "[USER@][REGISTRY#]IMAGE[:TAG]|PATH", "the image", 1, 0, note},
    {"container-mounts", "SRC:DST[:FLAGS][,SRC:DST...]", "folders that it sees", 1, 1, note},
    {"container-workdir", "PATH", "where it starts", 1, 2, note},
};

int slurm_spank_init(spank_t spank, int count, char **arguments)
{
    (void)count, (void)arguments;
    for (int i = 0; i < 3; i++)
        if (spank_option_register(spank, &options[i]))
            return -1;
    return 0;
}

int slurm_spank_task_init(spank_t spank, int count, char **arguments)
{
    (void)spank, (void)count, (void)arguments;
    if (found[0][0])
        fprintf(stderr, "pyxis: image %s, mounts %s, workdir %s\n", found[0], found[1], found[2]);
    return 0;
}
