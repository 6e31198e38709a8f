"""Words for keys and values, in two disjoint halves: one to train with, one to evaluate with."""

from __future__ import annotations

ADJECTIVES = """
able agile amber ample ancient arctic autumn azure bald basic blank blazing blissful bold bouncy brave breezy brief
bright brisk broad bronze bubbly busy calm careful cheerful chilly civic clean clever cloudy coastal cobalt colossal
common copper cosmic cozy crimson crisp curious curly daily damp dapper daring dark dazzling deep delicate dense
devout distant dizzy dreamy dusty eager early earnest eastern easy elastic electric elegant emerald empty endless
equal eternal exact fair faint famous fancy fearless feral festive fierce final fine firm flat floral fluffy foggy
formal fragile frank free fresh friendly frosty frozen fuzzy gallant gentle giant giddy gifted glad glassy gleaming
global glossy golden graceful grand gray greasy green gusty handy happy hardy harsh hasty hazy heavy hidden hollow
honest huge humble hungry icy ideal idle infinite inner ivory jade jaunty jolly jovial juicy keen kind lavish lazy
lean lively local lofty lone loud loyal lucky lunar magenta majestic mellow merry mighty mild misty modest molten
mossy muddy mute narrow neat nimble noble noisy northern novel oaken oblong odd olive opal orange outer oval pale
patient peaceful pearly placid plain playful pleasant plucky polished polite prime private proud pure purple quaint
quick quiet rainy rapid rare ready regal rich rigid ripe robust rocky rosy rough round royal ruby rugged rural rusty
salty sandy scarlet secret serene shady sharp shiny short silent silky silver simple sleepy sleek slender slim slow
small smart smoky smooth snowy sober soft solar solemn solid sour southern sparse speedy spicy spiral splendid spry
stable stark steady steep stern sticky still stormy stout strong sturdy subtle sunny superb supple swift tall tame
tangy teal tender tepid terse thick thin thirsty tidy tiny tough tranquil trim tropical true trusty turquoise upbeat
urban vague valiant vast velvet verdant vibrant violet vivid wandering warm watchful wavy wealthy western wide wild
windy winter wise witty woolen worthy yellow young zealous zesty
""".split()

NOUNS = """
acorn airport almond anchor anvil apple apron arch arrow atlas attic badge badger bagel bakery balloon bamboo banjo
banner barley barn barrel basin basket bay beacon beaver bell bench bicycle birch bison blanket blossom boat bonfire
book boot bottle boulder bowl bramble brick bridge brook broom bucket buckle buffalo bugle burrow butter button
cabbage cabin cactus camel camera canal candle canoe canyon cape captain caravan cargo carpet carrot cart castle
cavern cedar cello chair chalk chapel cherry chestnut chimney cider cinema circus citadel clarinet cliff clock cloud
clover coast cobbler coconut comet compass copse coral corner cottage cougar courtyard cove crab cradle crane crater
creek cricket crown crystal cup curtain cushion cypress dahlia daisy dam desert desk diamond dolphin donkey door dove
dragon drum dune eagle easel echo elbow elk elm ember engine envelope falcon farm feather fern ferry fiddle field fig
finch fjord flag flame flask flute forest forge fountain fox frigate frog galaxy garden gate gazelle geyser ginger
giraffe glacier glove goblet goose grape grove guitar gull hammer hamster harbor harp hat hatch hawk hazel heather
hedge helmet hen heron hill hive honey horn horse hotel iceberg igloo inlet iris island ivy jacket jaguar jar jasmine
jetty jewel jug jungle juniper kayak kettle kite kitten koala ladder lagoon lake lamp lantern lark laurel lemon lens
leopard library lighthouse lily lion lizard lobster locket lotus magnet magpie mango mantle maple marble market marsh
meadow melon mill mirror mitten moon moose moss mountain mule museum mushroom nectar needle nest oak oar oasis ocean
octopus olive onion orbit orchard orchid organ osprey otter owl oyster paddle palace panda panther parade parrot
pasture path peach peacock pear pebble pelican pencil pepper piano pier pigeon pillow pine pirate planet plaza plum
pocket pond pony poplar poppy porch prairie prism pumpkin puzzle quail quarry quartz quill rabbit raccoon raft rail
rainbow raven reef ribbon ridge river robin rocket rose saddle sailor salmon sapling satchel saucer scarf schooner
seal shell shield ship shore shovel sleigh snail sparrow spire spoon spruce squirrel stable stairway star statue
steeple stone stork stove stream sunset swallow swan table tavern teapot temple theater thicket thistle thunder tiger
timber torch tower trail train trumpet tulip tundra tunnel turtle umbrella valley vase velvet village vine violin
volcano wagon walnut walrus wand waterfall whale wharf wheat wheel whistle willow window wolf wren yacht zebra zephyr
""".split()


def half(words: list[str], evaluation: bool) -> list[str]:
    """Every second word of the sorted list: those at odd places are for evaluation alone."""
    return sorted(set(words))[1 if evaluation else 0 :: 2]


def evaluation_words() -> frozenset[str]:
    """All words whose only place is in evaluation keys; a word of both lists may not cross over either."""
    train = set(half(ADJECTIVES, False)) | set(half(NOUNS, False))
    return frozenset((set(half(ADJECTIVES, True)) | set(half(NOUNS, True))) - train)
