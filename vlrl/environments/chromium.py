"""Which Chromium is used, and with which flags; GUI data and tasks that act on pages share them."""

from __future__ import annotations

import importlib.util
import shutil

from vlrl.errors import ConfigError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chromium-headless-shell")
_DISABLED = ("AvoidUnnecessaryBeforeUnloadCheckSync", "DestroyProfileOnBrowserClose", "HttpsUpgrades",
             "HttpsFirstBalancedModeAutoEnable", "LensOverlay", "MediaRouter", "PaintHolding",
             "ThirdPartyStoragePartitioning", "AvoidCorsURLLoaderRestartOnRedirect", "TcpPortRandomizationWin",
             "OptimizationHints", "NetworkTimeServiceQuerying", "AimEnabled", "PreconnectToSearch",
             "msForceBrowserSignIn", "msEdgeUpdateLaunchServicesPreferredVersion",
             "WebUIOmniboxPopup", "WebUIOmniboxAimPopup")
"""What playwright 1.65 disables, as Chromium heeds the last such list alone, and the lists below the address bar: two
processes in each window of Chromium 156, which nobody sees and which take most of the time of a new page."""
FLAGS = ("--no-sandbox", "--disable-background-networking", "--disable-lcd-text", "--font-render-hinting=none",
         "--force-color-profile=srgb", "--hide-scrollbars", "--disable-features=" + ",".join(_DISABLED))
"""No sandbox, for containers run as root: the pages are files of this machine. The others keep pixels the same and
pages cheap."""

STEADY = ("--disable-partial-raster", "--disable-threaded-animation", "--disable-threaded-scrolling",
          "--disable-checker-imaging", "--disable-image-animation-resync")
"""For screenshots: what is drawn does not depend on when, e.g. a part that changed is not drawn anew into a picture of
before."""


def chromium_program(named: str = "") -> str | None:
    """Returns the program of Chromium: the named one, else the first on the path; None = playwright's own.

    Raises ConfigError where playwright, which drives it, is not installed.
    """
    if importlib.util.find_spec("playwright") is None:
        raise ConfigError("playwright drives the browser and is not installed: pip install 'vlrl[gui]'")
    return named or next(filter(None, map(shutil.which, BROWSERS)), None)


def browser_start_error(program: str | None, error: Exception, setting: str) -> ConfigError:
    """Returns what to say of a browser that cannot be started; `setting` names its program."""
    return ConfigError(f"{program or 'Chromium'} cannot be started: {str(error).splitlines()[0][:200]}. Install it "
                       "(apt-get install chromium, or `playwright install chromium`), or name its program with "
                       f"{setting}")
